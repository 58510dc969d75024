"""Which rank is slower than it should be, and in which phase: from what every rank spent on itself. Without torch.

A rank that waits for a slow one spends as long in a step as that one does, so whole steps tell nothing. What counts
is a rank's own time in a phase, without what it waited for others. It is compared with that of ranks that do the same
work; where there are none (each stage of a pipeline on one rank), with what the rank itself took at its best. Ranks
that do other work tell something too, where a plan says how long each should take: a stage slow from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
"""The phases that are judged."""
THRESHOLD = 0.75
"""The score below which a phase is slow: what it should take, by what it took."""
PLANNED = 0.6
"""The same where what it should take follows from a plan, which may be wrong about single stages."""
MATTERS = 0.1
"""The share of a step that slowness must cost; less is noise of phases that take next to nothing."""
NEEDED, WINDOWS = 2, 3
"""A rank is named that was slow in so many of the last windows, and no longer one that was not."""


@dataclass(frozen=True)
class Sections:
    """What one rank spent in a window of steps."""

    rank: int
    seconds: Mapping[str, float]
    """A step's own seconds by phase, without waiting for others; a phase of which that is not known is left out."""
    step_s: float
    """How long a step took altogether."""
    kind: str = ""
    """Ranks of one kind do the same work."""
    host: str = ""
    work: Mapping[str, float] = field(default_factory=dict)
    """What phases should take by a plan, in a unit that all ranks share; those that it knows."""


@dataclass(frozen=True)
class Slow:
    """A phase in which a rank is slow."""

    rank: int
    host: str
    phase: str
    relative: float | None
    """How many times as long it takes as the others do; None where no other does the same work, or none any."""
    own: float
    """How many times as long it takes as it did at its best."""
    excess_s: float
    """Seconds a step that it takes longer than it should."""
    planned: float | None = None
    """How many times as long it takes as its part of the model should beside the others' parts, where that is what
    tells."""


@dataclass(frozen=True)
class Verdict:
    """What one window has changed."""

    named: list[Slow] = field(default_factory=list)
    """Slow from now on."""
    cleared: list[Slow] = field(default_factory=list)
    """As fast as others again; with what was last found."""


class Stragglers:
    """The judge of a run: keeps what ranks took at their best, and how they did in the last windows."""

    def __init__(self, threshold: float = THRESHOLD, needed: int = NEEDED, windows: int = WINDOWS) -> None:
        self.threshold, self.needed, self.windows = threshold, needed, windows
        self.slow: dict[tuple[int, str], Slow] = {}
        """Who is slow now, by rank and phase."""
        self._best: dict[tuple[int, str], float] = {}
        self._last: dict[tuple[int, str], deque[bool]] = {}

    def judge(self, window: Sequence[Sections]) -> Verdict:
        """Take in what all ranks spent in a window."""
        verdict = Verdict()
        for phase in PHASES:
            told = [one for one in window if phase in one.seconds]
            for one in told:
                key = one.rank, phase
                self._best[key] = min(one.seconds[phase], self._best.get(key, one.seconds[phase]))
            for one in told:
                self._note(self._look(one, phase, told), one.rank, phase, verdict)
        return verdict

    def _note(self, found: Slow | None, rank: int, phase: str, verdict: Verdict) -> None:
        key = rank, phase
        last = self._last.setdefault(key, deque(maxlen=self.windows))
        last.append(found is not None)
        if sum(last) >= self.needed and found is not None:
            if key not in self.slow:
                verdict.named.append(found)
            self.slow[key] = found
        elif sum(last) < self.needed and key in self.slow:
            verdict.cleared.append(self.slow.pop(key))

    def _look(self, one: Sections, phase: str, told: Sequence[Sections]) -> Slow | None:
        """How slow a rank is in a phase of this window; None where it is not."""
        spent = one.seconds[phase]
        others = [other for other in told if other.rank != one.rank]
        if not others:
            return None
        own, relative, planned = self._own(one, phase), None, None
        alike = [other for other in others if _same_work(one, other, phase)]
        if alike:
            expected = median_low(other.seconds[phase] for other in alike)
            relative = spent / expected if expected > 0 else None
        else:
            # Its best, times what has changed for everybody, such as a larger batch.
            expected = self._best[one.rank, phase] * median_low(self._own(other, phase) for other in others)
        # Who is named stays so until it is clearly better, and does not come and go with the rest of the step.
        matters = (MATTERS / 2 if (one.rank, phase) in self.slow else MATTERS) * one.step_s
        if not _is_slow(spent, expected, self.threshold, matters):
            expected = _by_plan(one, others, phase)
            if not _is_slow(spent, expected, PLANNED, matters):
                return None
            planned = spent / expected
        return Slow(one.rank, one.host, phase, relative, own, spent - expected, planned)

    def _own(self, one: Sections, phase: str) -> float:
        """How many times as long it takes as at its best."""
        best = self._best[one.rank, phase]
        return one.seconds[phase] / best if best > 0 else 1.0


def _is_slow(spent: float, expected: float, threshold: float, matters: float) -> bool:
    return expected < threshold * spent and spent - expected >= matters


def _by_plan(one: Sections, others: Sequence[Sections], phase: str) -> float:
    """What a rank should take where others, whose parts of the model differ from its own, take what they do; as long
    as can be where no plan tells."""
    if phase not in one.work:
        return float("inf")
    elsewhere = [other for other in others if other.kind != one.kind and other.work.get(phase, 0.0) > 0]
    if not elsewhere:
        return float("inf")
    return one.work[phase] * median_low(other.seconds[phase] / other.work[phase] for other in elsewhere)


def _same_work(one: Sections, other: Sections, phase: str) -> bool:
    """Whether two ranks do the same in a phase."""
    if phase == "data":
        # Whichever layers they hold.
        return True
    # The first rank commits what all have written.
    return one.kind == other.kind and not (phase == "checkpoint" and 0 in (one.rank, other.rank))


def sentence(slow: Slow) -> str:
    """A finding in words."""
    where = f" on {slow.host}" if slow.host else ""
    against = [f"{slow.relative:.1f} times the other ranks"] if slow.relative is not None else []
    against += [f"{slow.own:.1f} times its own best"] if slow.own >= 1.05 else []
    against += [f"{slow.planned:.1f} times what its stage should take"] if slow.planned is not None else []
    against.append(f"{slow.excess_s:.3g} s a step too long")
    return f"rank {slow.rank}{where} is slow in {slow.phase}: {', '.join(against)}"
