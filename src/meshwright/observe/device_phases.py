"""How long the phases of steps took, by a GPU's clock: the host only launches work, and runs ahead of it.

At each border between phases an event goes into the GPU's queue. The GPU notes the time when it comes by; the host asks
a step later, and never waits for the answer. What keeps the host from launching shows as well: the GPU runs dry, and
the next border is late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.observe.host_phases import Timed
from meshwright.pulse import Pulse


@dataclass
class _Launched:
    """A step whose borders are in the GPU's queue."""

    step: int
    borders: list[tuple[str, torch.cuda.Event]]
    """Phases with the events at which they begin."""
    end: torch.cuda.Event


class DevicePhases:
    """Phases between events on the GPU's current stream."""

    def __init__(self, pulse: Pulse, device: torch.device) -> None:
        self._pulse, self._device = pulse, device
        self._borders: list[tuple[str, torch.cuda.Event]] = []
        self._launched: deque[_Launched] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._anchor: tuple[float, torch.cuda.Event, int] | None = None
        """A moment by the host's clock and by the GPU's, and how many borders of the step lie before it."""

    def begin(self) -> None:
        """The first step begins here; what came before does not count."""
        if self._note not in self._pulse.listeners:
            self._pulse.listeners.append(self._note)
        self._launched.clear()
        self._borders = [(self._pulse.phase, self._mark())]

    def end_step(self, step: int) -> None:
        """A step ends here."""
        end = self._mark()
        self._launched.append(_Launched(step, self._borders, end))
        self._borders = [(self._pulse.phase, end)]

    def timed(self) -> Iterator[Timed]:
        """The steps that have become known, in order; asks the GPU and does not wait for it."""
        while self._launched and self._launched[0].end.query():
            done = self._launched.popleft()
            phases: dict[str, float] = {}
            events = [*[event for _, event in done.borders], done.end]
            for (name, begin), end in zip(done.borders, events[1:], strict=True):
                phases[name] = phases.get(name, 0.0) + begin.elapsed_time(end) / 1000
            yield Timed.of(done.step, events[0].elapsed_time(done.end) / 1000, phases)
            # The end is the beginning of the next one.
            self._spare += events[:-1]

    def begin_timeline(self) -> None:
        """From here on, remember when each phase begins; waits once, so that both clocks show the same moment."""
        torch.cuda.synchronize(self._device)
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        self._anchor = time.monotonic(), anchor, len(self._borders)

    def end_timeline(self) -> list[tuple[str, float]]:
        """The phases since then with their beginnings, in seconds of the host's monotonic clock; waits for the GPU."""
        assert self._anchor is not None
        torch.cuda.synchronize(self._device)
        moment, anchor, before = self._anchor
        self._anchor = None
        since = [(name, moment + anchor.elapsed_time(event) / 1000) for name, event in self._borders[before:]]
        return [(self._borders[before - 1][0], moment), *since]

    def settle(self) -> None:
        """Wait until all steps that have ended are known."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Take no more times."""
        if self._note in self._pulse.listeners:
            self._pulse.listeners.remove(self._note)

    def _note(self, phase: str, _: float) -> None:
        self._borders.append((phase, self._mark()))

    def _mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
