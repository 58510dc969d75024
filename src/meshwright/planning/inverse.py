"""Inverse questions: the longest sequence, the largest micro-batch, the largest model; what interruptions cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from meshwright.errors import UserError
from meshwright.models.count import count_parameters
from meshwright.models.presets import presets
from meshwright.planning.constraints import Constraint
from meshwright.planning.question import Candidate, Question
from meshwright.planning.search import plain_best, search

CHECKPOINT_GB_S = 2.0
"""Written a second by each machine, where nothing else is said."""
RESTART_S = 300.0
"""From the loss of a machine to the first step after it, where nothing else is said."""


def fits(question: Question) -> Candidate | None:
    """Something that fits: what a quick look finds, or else the whole search."""
    try:
        return plain_best(question) or search(question).best
    except UserError:
        return None


def longest_sequence(question: Question) -> tuple[int, Candidate] | None:
    """The longest sequence: a multiple of 1024 up to the model's positions, these themselves, or the one asked about.

    It has the same number of tokens a step where the batch allows it.
    """
    tokens, positions = question.global_batch * question.sequence_length, question.spec.max_position_embeddings

    def at(length: int) -> Candidate | None:
        gpus = question.cluster.gpus
        batch = max(1, tokens // length)
        # As many samples as can be dealt out in some way.
        batch = batch // gpus * gpus if batch >= gpus else 1 << (batch.bit_length() - 1)
        return fits(replace(question, sequence_length=length, global_batch=batch))

    lengths = sorted({*range(1024, positions + 1, 1024), positions, min(question.sequence_length, positions)})
    return _largest(at, lengths)


def largest_micro_batch(question: Question) -> tuple[int, Candidate] | None:
    """The largest micro-batch (a power of two) with which something fits."""
    best: tuple[int, Candidate] | None = None
    size = 1
    while size <= question.shared:
        asked = replace(question, constraints=(*question.constraints, Constraint("micro_batch", "=", size)))
        found = fits(asked)
        if found is None and best is not None:
            break
        best = best if found is None else (size, found)
        size *= 2
    return best


def largest_model(question: Question) -> tuple[str, Candidate] | None:
    """The largest preset of those that the trainer can build that fits on the cluster."""
    known = [one for one in presets().values() if one.spec.latent_attention is None]
    for one in sorted(known, key=lambda one: -count_parameters(one.spec).total):
        length = min(question.sequence_length, one.spec.max_position_embeddings)
        found = fits(replace(question, spec=one.spec, sequence_length=length))
        if found is not None:
            return one.name, found
    return None


def _largest(at: Callable[[int], Candidate | None], sizes: Sequence[int]) -> tuple[int, Candidate] | None:
    """The largest of ascending sizes for which there is something.

    There may be nothing for small ones either, so it comes from above: by halves, then between the two.
    """
    high = len(sizes)
    while high:
        low = high // 2 if high < len(sizes) else high - 1
        best = at(sizes[low])
        if best is not None:
            break
        high = low
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = at(sizes[middle])
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return sizes[low], best


@dataclass(frozen=True)
class Spot:
    """What interruptions cost, at a checkpoint interval."""

    interval_s: float
    best_interval_s: float
    checkpoint_s: float
    """Seconds that a checkpoint stops training."""
    slower: float
    """Share of time lost at the interval."""
    best_slower: float


def spot(
    candidate: Candidate,
    interruptions_per_day: float,
    interval_s: float | None = None,
    write_gb_s: float = CHECKPOINT_GB_S,
    restart_s: float = RESTART_S,
) -> Spot:
    """What is lost to interruptions of the whole job so many times a day, and the interval that loses least.

    Between checkpoints half an interval's work is lost on average, so the best interval is sqrt(2 x cost x mean time
    between interruptions), less what is lost anyway (Young, Daly).
    """
    cluster = candidate.scenario.cluster
    total = count_parameters(candidate.scenario.spec).total * 12 / 1e9
    checkpoint_s = total / (write_gb_s * cluster.nodes)
    between = 86_400 / interruptions_per_day
    best = max(checkpoint_s, sqrt(2 * checkpoint_s * between))

    def lost(interval: float) -> float:
        return checkpoint_s / interval + (interval / 2 + restart_s) / between

    chosen = interval_s or best
    return Spot(chosen, best, checkpoint_s, lost(chosen), lost(best))
