"""What a run with `comm.compress_after=auto` takes, whose steps go whole before compression begins. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.comm.compression import NONE
from meshwright.comm.whole_steps import whole_steps
from meshwright.planning.question import Candidate, Question, estimate, in_full


@dataclass(frozen=True)
class WholeAtFirst:
    """A run whose gradients travel whole for a share of its steps."""

    share: float
    whole_s: float
    """Of such a step."""
    mean_s: float
    """Of a step, over the whole run."""


def whole_at_first(question: Question, candidate: Candidate) -> WholeAtFirst | None:
    """How a run of a candidate begins; None where its steps are all alike."""
    share = whole_steps(candidate.scenario.layout.compression, 100) / 100
    if not share or candidate.strategy.dp == 1 or question.cluster.groups:
        return None
    # It may be one of a part of the machines.
    own = replace(question, cluster=candidate.scenario.cluster)
    uncompressed = estimate(own, replace(candidate.strategy, compress=NONE), candidate.micro_batch)
    whole_s = in_full(own, uncompressed).step_s
    return WholeAtFirst(share, whole_s, share * whole_s + (1 - share) * candidate.step_s)
