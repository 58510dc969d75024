"""How long a pipeline takes: by simulating the very schedules that the trainer runs, with unequal stages. No torch.

A long run of micro-batches repeats itself: two short simulations give what a round adds, and the rest follows. A lower
bound that needs no simulation lets a search leave out what cannot win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.schedules import (
    Action,
    border_of,
    in_order,
    make_program,
    placement_of,
    splits_backward,
    stages_per_rank,
)

ROUNDS = 3
"""Rounds of micro-batches, one for each rank, after which a schedule repeats itself."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, and between ranks."""

    forward: Sequence[float]
    backward: Sequence[float]
    """To the input alone where the schedule splits backward passes, else all of it."""
    weights: Sequence[float]
    """To the weights, where it splits them; else zeros."""
    transfers: Sequence[float]
    """From each rank to the next, and from the last to the first; as long on the way back."""

    def of(self, kind: str, stage: int) -> float:
        """What an action takes."""
        if kind == "F":
            return self.forward[stage]
        return self.weights[stage] if kind == "W" else self.backward[stage]


def rank_work(schedule: str, ranks: int, times: StageTimes) -> list[float]:
    """Seconds that each rank computes for one micro-batch."""
    work = [0.0] * ranks
    for stage, rank in enumerate(placement_of(schedule, ranks)):
        work[rank] += times.forward[stage] + times.backward[stage] + times.weights[stage]
    return work


def shortest(schedule: str, ranks: int, micro_batches: float, times: StageTimes) -> float:
    """A time that no schedule of these stages can go below.

    A rank's first pass waits for those before it. Then it has its own work to do, and after its last gradient of an
    input that gradient still goes back through the ranks before it; gradients of weights may come later.
    """
    work = rank_work(schedule, ranks, times)
    late = [0.0] * ranks
    for stage, rank in enumerate(placement_of(schedule, ranks)):
        late[rank] += times.weights[stage]
    there = back = longest = 0.0
    for rank in range(ranks):
        waited = micro_batches * (work[rank] - late[rank]) + back
        longest = max(longest, there + max(micro_batches * work[rank], waited))
        there += times.forward[rank] + times.transfers[rank]
        back += times.backward[rank] + times.transfers[rank]
    return longest


def length(schedule: str, ranks: int, micro_batches: int, times: StageTimes) -> float:
    """Seconds from the first pass to the last."""
    if ranks == 1:
        return micro_batches * (times.forward[0] + times.backward[0] + times.weights[0])
    most = ROUNDS * ranks + micro_batches % ranks
    if micro_batches <= most + ranks:
        return _run(schedule, ranks, micro_batches, times)
    shorter, longer = _run(schedule, ranks, most, times), _run(schedule, ranks, most + ranks, times)
    return shorter + (longer - shorter) * (micro_batches - most) / ranks


def _run(schedule: str, ranks: int, micro_batches: int, times: StageTimes) -> float:
    """One simulation: as `schedules.simulate`, of the end alone."""
    plan = _order(schedule, ranks, micro_batches)
    costs = [[times.of(kind, stage) for stage in range(ranks * stages_per_rank(schedule))] for kind in ("F", "B", "W")]
    # What stays on its rank has the last one: its border is -1.
    transfers = [*times.transfers, 0.0]
    clocks = [0.0] * ranks
    ends = [0.0] * len(plan)
    for index, (rank, kind, stage, first, first_border, second, second_border) in enumerate(plan):
        start = clocks[rank]
        if first >= 0:
            arrival = ends[first] + transfers[first_border]
            if arrival > start:
                start = arrival
        if second >= 0:
            arrival = ends[second] + transfers[second_border]
            if arrival > start:
                start = arrival
        clocks[rank] = ends[index] = start + costs[kind][stage]
    return max(clocks)


@lru_cache(maxsize=512)
def _order(schedule: str, ranks: int, micro_batches: int) -> list[tuple[int, int, int, int, int, int, int]]:
    """All actions in an order in which none comes before what it waits for: rank, kind, stage, and what that is, with
    the border of ranks that it comes over."""
    program = make_program(schedule, ranks, micro_batches)
    found: dict[Action, int] = {}
    plan: list[tuple[int, int, int, int, int, int, int]] = []
    for rank, action, needed in in_order(program):
        pairs = [(found[one], border_of(program.placement[one.stage], rank, ranks)) for one in needed]
        pairs += [(-1, -1)] * (2 - len(pairs))
        found[action] = len(plan)
        kind = 0 if action.kind == "F" else 2 if action.kind == "W" else 1
        plan.append((rank, kind, action.stage, *pairs[0], *pairs[1]))
    return plan


def in_flight(schedule: str, ranks: int, micro_batches: int) -> list[tuple[int, ...]]:
    """For each rank, how many micro-batches of each of its stages are held at once when it holds the most of all.

    A micro-batch is held from its forward pass to its last backward pass. Closed forms of the orders in `schedules`; a
    test counts them there.
    """
    chunks = stages_per_rank(schedule)
    if schedule == "gpipe":
        return [(micro_batches,)] * ranks
    if schedule == "zbv":
        # It lets a rank hold as much as the first one does under 1f1b: as many passes as there are stages.
        return [(min(micro_batches, ranks),) * 2] * ranks
    if chunks == 1:
        # Weights of split passes wait for as many micro-batches as there are ranks before this one.
        late = schedule == "zero-bubble"
        return [(min(micro_batches, ranks - rank + (rank if late else 0)),) for rank in range(ranks)]
    wave = -(-micro_batches // max(1, micro_batches // ranks))
    result = []
    for rank in range(ranks):
        ahead = min(chunks * micro_batches, 2 * (ranks - 1 - rank) + (chunks - 1) * wave + 1)
        rounds, rest = divmod(ahead, chunks * wave)
        held = [rounds * wave + max(0, min(wave, rest - chunk * wave)) for chunk in range(chunks)]
        result.append(tuple(held))
    return result


def waiting_weights(schedule: str, ranks: int, micro_batches: int) -> list[int]:
    """For each rank, of about how many passes the gradients of weights wait when it holds the most."""
    if not splits_backward(schedule):
        return [0] * ranks
    if schedule == "zero-bubble":
        return [min(micro_batches, rank + 1) for rank in range(ranks)]
    if micro_batches < 2 * ranks:
        return [min(2 * micro_batches, ranks + 1 + rank) for rank in range(ranks)]
    return [ranks + (rank + 1) // 2 for rank in range(ranks)]
