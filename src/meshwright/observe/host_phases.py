"""How long the phases of steps took, by the host's clock: where the host computes, that is when they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from meshwright.pulse import PHASES, Pulse

BEFORE = ("start", "restore")
"""Phases before a first step, in which ranks wait for each other still."""


class Timed(NamedTuple):
    """A step whose phases are known."""

    step: int
    seconds: float
    phases: dict[str, float]

    @staticmethod
    def of(step: int, seconds: float, phases: dict[str, float]) -> Timed:
        """What was timed, without what came before the step."""
        before = sum(phases.pop(name, 0.0) for name in BEFORE)
        return Timed(step, seconds - before, phases)


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
        phases = {
            name: after - before
            for name, before, after in zip(PHASES, self._spent, spent, strict=True)
            if after > before
        }
        self._timed.append(Timed.of(step, now - self._began, phases))
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
