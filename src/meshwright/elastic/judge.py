"""Which ranks hold up the others: from what is seen of each rank to a verdict. Without torch, without side effects.

A rank that waits for another is not to blame, however long it waits. So blame follows the waits to their end: a rank
that is stopped or gone, ranks that call different collectives, ranks that wait for each other in a circle, or a rank
that waits for nobody and has not come to where the others are. It must be over its own limit as well, so that whoever
waits for a long save does not raise an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.elastic.arrivals import Mismatch, Wait, Word, find_mismatch, find_waits
from meshwright.elastic.processes import STOPPED, ProcessState
from meshwright.elastic.stacks import Stacks
from meshwright.pulse import NOBODY, Beat


@dataclass(frozen=True)
class View:
    """A rank as it is seen from outside."""

    rank: int
    pid: int
    process: ProcessState
    beat: Beat | None
    """None before its first word."""
    age_s: float
    """How long it has been in its phase."""
    limit_s: float
    """How long it may be."""
    halted_s: float = 0.0
    """How long its process has been stopped by a signal, or gone."""
    moving: bool = False
    """Whether its stack was seen to change within the phase: it is slow, not stuck."""
    stacks: Stacks = field(default_factory=Stacks)
    host: str = ""
    """Its machine; empty is this one."""
    kernel: str = ""
    """The function of the kernel that its process waits in, where that is known."""

    @property
    def over(self) -> bool:
        """Whether it has been in its phase for too long."""
        return self.age_s > self.limit_s

    @property
    def stuck(self) -> bool:
        """Whether it will not come by itself."""
        return self.process.ended or (self.over and not self.moving)

    @property
    def finished(self) -> bool:
        """Whether it had come to the end of the run: that it then ends is no fault."""
        return self.beat is not None and (self.beat.phase == "end" or self.beat.ended.get("end", 0) > 0)


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others, and why one thinks so."""

    cause: str
    """gone, stopped, mismatch, circle, late, stalled, unseen; empty when nobody is stuck."""
    guilty: tuple[int, ...] = ()
    certain: bool = True
    """Whether that is a hang; else the guilty may still come along by themselves."""
    waits: tuple[Wait, ...] = ()
    mismatch: Mismatch | None = None
    unseen: tuple[int, ...] = ()
    """Ranks that others wait for, on machines of which nothing is known here."""


def judge(
    views: Mapping[int, View],
    words: Mapping[int, Word],
    *,
    world: int,
    floor_s: float,
    longest_s: float,
    gone_s: float = 5.0,
) -> Verdict:
    """The verdict on ranks, of `world` in all; of the others nothing is known here.

    What can be proved (ranks that are stopped, that disagree, that wait for each other) is told after `floor_s`, what
    can only be guessed from the time it takes after the limit of the rank, and nothing may stand still for longer than
    `longest_s`.
    """
    waits = tuple(find_waits(words))
    gone = [view.rank for view in views.values() if view.process.ended and not view.finished]
    if gone:
        certain = any(views[rank].halted_s > gone_s for rank in gone)
        return Verdict("gone", tuple(gone), certain, waits)
    stopped = [view for view in views.values() if view.process.state == STOPPED]
    if stopped:
        certain = any(view.halted_s > floor_s for view in stopped)
        return Verdict("stopped", tuple(view.rank for view in stopped), certain, waits)
    if not any(view.over or view.age_s > floor_s for view in views.values()):
        return Verdict("")
    mismatch = find_mismatch(words)
    if mismatch is not None:
        return Verdict("mismatch", mismatch.odd, True, waits, mismatch)
    circle = _circle(views, waits_for(views, waits, world))
    if circle and all(views[rank].over or views[rank].age_s > floor_s for rank in circle):
        return Verdict("circle", circle, True, waits)
    late = [view for view in views.values() if view.over]
    return _follow(views, late, waits, waits_for(views, waits, world), longest_s) if late else Verdict("")


def _circle(views: Mapping[int, View], edges: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Ranks that wait for each other, and for nobody who could go on by himself."""
    return tuple(sorted({rank for view in views.values() for rank in _ends(view.rank, edges) if edges.get(rank)}))


def _follow(
    views: Mapping[int, View],
    late: Iterable[View],
    waits: tuple[Wait, ...],
    edges: Mapping[int, set[int]],
    longest_s: float,
) -> Verdict:
    """Follow the waits from ranks that are late to those that wait for nobody."""
    in_collective = {wait.rank for wait in waits}
    ends: set[int] = set()
    for view in late:
        ends |= _ends(view.rank, edges)
    unseen = tuple(sorted(rank for rank in ends if rank not in views))
    seen = sorted(rank for rank in ends if rank in views)
    too_long = any(view.age_s > max(longest_s, *(views[rank].limit_s for rank in (view.rank, *seen))) for view in late)
    circle = sorted(rank for rank in seen if edges.get(rank))
    if circle:
        return Verdict("circle", tuple(circle), too_long, waits, unseen=unseen)
    stalled = [rank for rank in seen if rank in in_collective]
    guilty = [rank for rank in seen if rank not in in_collective]
    stuck = tuple(rank for rank in guilty if views[rank].stuck)
    if stuck:
        return Verdict("late", stuck, True, waits, unseen=unseen)
    if guilty:
        return Verdict("late", tuple(guilty), too_long, waits, unseen=unseen)
    if unseen:
        # The machine of those ranks sees them and judges; this one only makes sure that somebody does.
        return Verdict("unseen", (), too_long, waits, unseen=unseen)
    # All are there, and none is to blame; one of them may have come just now.
    there = {rank for wait in waits if wait.rank in stalled for rank in wait.group[1]}
    certain = too_long or all(views[rank].over for rank in there)
    return Verdict("stalled", (), certain, waits)


def waits_for(views: Mapping[int, View], waits: Iterable[Wait], world: int) -> dict[int, set[int]]:
    """By rank, the ranks that it waits for."""
    edges: dict[int, set[int]] = {}
    for wait in waits:
        edges.setdefault(wait.rank, set()).update(wait.missing, wait.unknown)
    for view in views.values():
        if view.beat is not None and view.beat.waits_for != NOBODY:
            edges.setdefault(view.rank, set()).add(view.beat.waits_for)
        elif view.rank not in edges and view.stacks.collective:
            # It makes or checks a group, of which the recorder knows nothing: it waits for any of the others.
            edges[view.rank] = set(range(world)) - {view.rank}
    return edges


def _ends(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Where the waits that begin at a rank lead: ranks that wait for nobody; where there are none, a circle."""
    reached: set[int] = set()
    todo = [rank]
    while todo:
        one = todo.pop()
        if one not in reached:
            reached.add(one)
            todo += edges.get(one, ())
    ends = {one for one in reached if not edges.get(one)}
    return ends or {one for one in reached if one in _after(one, edges)}


def _after(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    """All that a rank waits for, directly or not."""
    reached: set[int] = set()
    todo = list(edges.get(rank, ()))
    while todo:
        one = todo.pop()
        if one not in reached:
            reached.add(one)
            todo += edges.get(one, ())
    return reached
