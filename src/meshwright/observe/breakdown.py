"""Where the time of a step went: computing, communication that nothing hides, waiting for another stage, or nothing.

Plain arithmetic on intervals of one clock, without torch. Time that is computed is computed, whatever travels
meanwhile; of the rest, what is spent waiting for another stage is bubble, what is spent with a communication under way
is exposed communication, and what is left is idle. Each lies in a phase of the step; what comes after the update
(evaluations, saves, hooks) is no part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""From when to when."""
PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""Those of the step itself."""
LATE_S = 3e-3
"""By how much the end of a communication may be noted after those who waited for it went on."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What lies in both; each is disjoint and in order."""
    found, here, there = [], 0, 0
    while here < len(first) and there < len(second):
        begin = max(first[here][0], second[there][0])
        end = min(first[here][1], second[there][1])
        if begin < end:
            found.append((begin, end))
        if first[here][1] < second[there][1]:
            here += 1
        else:
            there += 1
    return found


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What lies in the first and not in the second; each is disjoint and in order."""
    found, there = [], 0
    for begin, end in first:
        while there < len(second) and second[there][1] <= begin:
            there += 1
        at = there
        while at < len(second) and second[at][0] < end:
            if begin < second[at][0]:
                found.append((begin, second[at][0]))
            begin = max(begin, second[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """How long disjoint intervals are together."""
    return sum(end - begin for begin, end in intervals)


@dataclass(frozen=True)
class Step:
    """What is known of a step on one rank, by one clock."""

    begin: float
    end: float
    phases: Sequence[tuple[str, float]]
    """Phases in order with their beginnings; each lasts until the next one, the last one to the end."""
    compute: Sequence[Interval]
    communication: Sequence[Interval]
    """From when to when each collective or transfer was under way."""
    waits: Sequence[Interval] = ()
    """Waiting for what another stage sends or takes."""
    meetings: Sequence[Interval] = ()
    """Collectives in which stages meet: whoever waits in one waits for another stage."""
    transfers: Sequence[Interval] = ()
    """Messages between stages, where all waiting for them is in `waits`: nothing else of them is exposed."""
    host: bool = True
    """Whether the one who computes is also the one who launches: then there is time in which it does neither, which
    is no wait for a communication unless one ends in it."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds; compute, exposed, bubble and idle add up to the phases of the step itself."""

    compute: float
    exposed: float
    overlapped: float
    bubble: float
    idle: float
    phases: dict[str, float]
    """Of each phase all of its time."""
    exposed_in: dict[str, float]
    bubble_in: dict[str, float]

    @property
    def net(self) -> dict[str, float]:
        """Of each phase what is neither exposed communication nor bubble; with these two, all of the step."""
        taken = {name: self.exposed_in.get(name, 0.0) + self.bubble_in.get(name, 0.0) for name in self.phases}
        # Sums of floats in another order may differ in their last digit.
        return {name: max(0.0, seconds - taken[name]) for name, seconds in self.phases.items()}


def break_down(step: Step) -> Breakdown:
    """What became of a step's time."""
    phases = _phases(step)
    whole = union(part for name, parts in phases.items() if name in PHASES for part in parts)
    communication = intersect(union([*step.communication, *step.transfers, *step.meetings]), whole)
    compute = intersect(union(step.compute), whole)
    exposing = _waited_for if step.host else _under_way
    bubble = subtract(intersect(union(step.waits), whole), compute)
    bubble = union([*bubble, *exposing(subtract(subtract(whole, compute), bubble), step.meetings)])
    exposed = exposing(subtract(subtract(whole, compute), bubble), step.communication)
    seconds = total(whole)
    sums = total(compute), total(exposed), total(bubble)
    return Breakdown(
        compute=sums[0],
        exposed=sums[1],
        overlapped=max(0.0, total(communication) - total(intersect(communication, union([*exposed, *bubble])))),
        bubble=sums[2],
        idle=max(0.0, seconds - sum(sums)),
        phases={name: total(parts) for name, parts in phases.items()},
        exposed_in=_by_phase(exposed, phases),
        bubble_in=_by_phase(bubble, phases),
    )


def _under_way(gaps: Sequence[Interval], communication: Sequence[Interval]) -> list[Interval]:
    """Of the gaps between computations, what was spent with a communication under way."""
    return intersect(union(communication), gaps)


def _waited_for(gaps: Sequence[Interval], communication: Sequence[Interval]) -> list[Interval]:
    """Of the gaps between computations, what was spent until a communication ended that ended there.

    Who waited may be at work again before it is noted that the communication has ended.
    """
    by_end = sorted(communication, key=lambda one: one[1])
    ends = [end for _, end in by_end]
    found = []
    for begin, end in gaps:
        ended = by_end[bisect_right(ends, begin) : bisect_right(ends, end + min(LATE_S, end - begin))]
        found += intersect(union(ended), [(begin, end)])
    return found


def _phases(step: Step) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    borders = [*[begin for _, begin in step.phases], step.end]
    for (name, begin), end in zip(step.phases, borders[1:], strict=True):
        begin, end = max(begin, step.begin), min(end, step.end)
        if begin < end:
            found.setdefault(name, []).append((begin, end))
    return found


def _by_phase(intervals: Sequence[Interval], phases: dict[str, list[Interval]]) -> dict[str, float]:
    found = {name: total(intersect(intervals, parts)) for name, parts in phases.items()}
    return {name: seconds for name, seconds in found.items() if seconds}
