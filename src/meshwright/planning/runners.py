"""What else there is beside the best strategy: other families and what they lose on, fewer chips. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cluster.cluster import Cluster
from meshwright.errors import UserError
from meshwright.planning.bounds import in_order
from meshwright.planning.changes import Change, cheapest_change
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.families import families, family_of
from meshwright.planning.least_memory import nearest
from meshwright.planning.question import Candidate, Question, in_full
from meshwright.planning.search import plain_best, search
from meshwright.planning.space import Space
from meshwright.planning.state_memory import GIB

LOOKED_AT = 150
"""Degrees that a quick look at another family or number of chips goes through."""


ONE_BY_ONE = 16
"""Numbers of machines up to which each is tried."""


@dataclass(frozen=True)
class Runner:
    """A family of strategies that lost, its best member, and what it loses on."""

    family: str
    candidate: Candidate | None
    change: Change | None
    """Where it does not fit, what would make it fit."""
    reason: str


def runners_of(question: Question, best: Candidate) -> tuple[Runner, ...]:
    """The best of each other family, or why it has none."""
    runners = []
    for family, extra in families().items():
        if family == family_of(best.strategy):
            continue
        asked = replace(question, constraints=(*question.constraints, *extra))
        # What fits may not be among the plain ones.
        candidate = plain_best(asked, LOOKED_AT) or _searched(asked)
        if candidate is not None:
            candidate = in_full(question, candidate)
            runners.append(Runner(family, candidate, None, loss(best, candidate)))
            continue
        failing = _smallest(asked)
        if failing is not None and not failing.fits:
            failing = in_full(question, failing)
            peak = failing.memory.peak / GIB
            reason = f"does not fit: {peak:.1f} of {failing.memory.capacity / GIB:.1f} GiB"
            runners.append(Runner(family, failing, cheapest_change(question, failing), reason))
    return tuple(runners)


def _smallest(question: Question) -> Candidate | None:
    """The member of a family that is nearest to fitting, without recompute and host memory where they may be so."""
    words = [f"{key}=none" for key in ("recompute", "offload") if question.allows(**{key: "none"})]
    asked = replace(question, constraints=(*question.constraints, *parse_constraints(words)))
    space = Space(asked)
    return nearest(asked, space, in_order(space)[:LOOKED_AT])


def _searched(question: Question) -> Candidate | None:
    try:
        return search(question).best
    except UserError:
        return None


def loss(best: Candidate, other: Candidate) -> str:
    """In words, what another candidate spends more on."""
    slower = other.step_s / best.step_s - 1
    words = {
        "compute": "smaller matrix products",
        "recompute": "recompute",
        "tp": "tensor-parallel communication",
        "cp": "context-parallel communication",
        "ep": "the experts' exchange",
        "dp": "gradients and parameters between data ranks",
        "bubble": "gaps in the pipeline",
        "optimizer": "the optimizer's step",
        "offload": "transfers to host memory",
        "other": "jitter",
        "paths": "waiting for paths between machines",
    }
    more = {name: getattr(other.parts, name) - value for name, value in vars(best.parts).items() if name in words}
    name = max(more, key=lambda one: more[one])
    if slower <= 0:
        return f"{-slower:.1%} faster, not enough for what it adds"
    if more[name] > other.step_s - best.step_s:
        return f"{slower:.1%} slower: {words[name]} {more[name]:+.3g} s, of which it wins some back elsewhere"
    return f"{slower:.1%} slower, most of it {words[name]} ({more[name]:+.3g} s)"


def on_fewer(question: Question, best: Candidate) -> tuple[Candidate, ...]:
    """Good strategies on a half and a quarter of the chips."""
    found = []
    for share in (2, 4):
        gpus = question.cluster.gpus // share
        if gpus < 1 or question.cluster.gpus % share:
            break
        asked = replace(question, cluster=question.cluster.with_gpus(gpus))
        candidate = plain_best(asked, LOOKED_AT)
        if candidate is None:
            break
        found.append(in_full(asked, candidate))
    return tuple(found)


def fewest_gpus(question: Question) -> Cluster | None:
    """The smallest part of the cluster on which something fits: of one machine any part, else whole machines."""
    node, gpus = question.cluster.node, question.cluster.gpus

    def fits(count: int) -> bool:
        asked = replace(question, cluster=question.cluster.with_gpus(count))
        quick = None if asked.cluster.groups else plain_best(asked)
        return quick is not None or _searched(asked) is not None

    for count in range(1, min(node, gpus) + 1):
        if fits(count):
            return question.cluster.with_gpus(count)
    machines = 1
    while machines * node < gpus:
        before, machines = machines, min(2 * machines, -(-gpus // node))
        if not fits(min(machines * node, gpus)):
            continue
        # Between the two a batch may not be divisible by every number: few of them are tried one by one.
        counts = [*range((before + 1) * node, machines * node, node), min(machines * node, gpus)]
        if len(counts) <= ONE_BY_ONE:
            return question.cluster.with_gpus(next(filter(fits, counts)))
        low, high = -1, len(counts) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(counts[middle]) else (middle, high)
        return question.cluster.with_gpus(counts[high])
    return None
