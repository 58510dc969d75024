"""How long the phases of steps took, by the host's clock: where the host computes, that is when they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from meshwright.pulse import PHASES, Pulse

BEFORE = ("start", "restore")
"""Phases before a first step, in which ranks wait for each other still."""

_BEFORE = tuple(map(PHASES.index, BEFORE))
_NOTHING = (0.0,) * len(PHASES)


class Timed(NamedTuple):
    """A step that was timed; what it says is worked out when somebody asks, which no step needs to wait for."""

    step: int
    lasted: float
    """Seconds since the end of the step before."""
    before: Sequence[float]
    """Seconds of each of PHASES until it began, ..."""
    after: Sequence[float]
    """... and until it ended."""

    @property
    def seconds(self) -> float:
        """How long it took, without what came before a first step."""
        return self.lasted - sum(self.after[number] - self.before[number] for number in _BEFORE)

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of the phases that it had."""
        found = {
            name: after - before
            for name, before, after in zip(PHASES, self.before, self.after, strict=True)
            if after > before
        }
        for name in BEFORE:
            found.pop(name, None)
        return found

    @staticmethod
    def of(step: int, lasted: float, phases: Mapping[str, float]) -> Timed:
        """A step whose phases took these seconds."""
        return Timed(step, lasted, _NOTHING, [phases.get(name, 0.0) for name in PHASES])


class Phases(Protocol):
    """Takes the time of the phases of steps, each from the end of the one before to its own."""

    def begin(self) -> None:
        """The first step begins here; what came before does not count."""

    def end_step(self, step: int) -> None:
        """A step ends here."""

    def timed(self) -> Iterator[Timed]:
        """The steps that have become known, in order."""

    def begin_timeline(self) -> None:
        """From here on, remember when each phase begins."""

    def end_timeline(self) -> list[tuple[str, float]]:
        """The phases since then with their beginnings, in seconds of the host's monotonic clock."""

    def settle(self) -> None:
        """Wait until all steps that have ended are known."""

    def close(self) -> None:
        """Take no more times."""


class HostPhases:
    """Phases by what the pulse adds up."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._began = 0.0
        self._spent = [0.0] * len(PHASES)
        self._timed: list[Timed] = []
        self._timeline: list[tuple[str, float]] = []

    def begin(self) -> None:
        """The first step begins here; what came before does not count."""
        self._began = time.monotonic()
        self._spent = self._pulse.spent_until(self._began)

    def end_step(self, step: int) -> None:
        """A step ends here."""
        now = time.monotonic()
        spent = self._pulse.spent_until(now)
        self._timed.append(Timed(step, now - self._began, self._spent, spent))
        self._began, self._spent = now, spent

    def timed(self) -> Iterator[Timed]:
        """The steps that have become known, in order."""
        while self._timed:
            yield self._timed.pop(0)

    def begin_timeline(self) -> None:
        """From here on, remember when each phase begins."""
        self._timeline = [(self._pulse.phase, time.monotonic())]
        self._pulse.listeners.append(self._note)

    def end_timeline(self) -> list[tuple[str, float]]:
        """The phases since then with their beginnings, in seconds of the host's monotonic clock."""
        self._pulse.listeners.remove(self._note)
        return self._timeline

    def settle(self) -> None:
        """All is known at once."""

    def close(self) -> None:
        """Nothing to do: the pulse adds up in any case."""

    def _note(self, phase: str, now: float) -> None:
        self._timeline.append((phase, now))
