"""When a rank's actions began and ended: host clock on the CPU, events on a GPU, where work goes on behind the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.schedules import Action


class Spans:
    """Records the actions of a step's micro-batches; times are seconds of the host's monotonic clock."""

    def __init__(self, device: torch.device, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._on_gpu = device.type == "cuda"
        self._started = time.perf_counter()
        self._first = self._last = self._mark()
        self._marks: list[tuple[Action, object, object]] = []

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """The context in which an action runs."""
        begin = self._mark()
        yield
        self._marks.append((action, begin, self._mark()))

    def finish(self) -> None:
        """The step's passes are done."""
        self._last = self._mark()

    def times(self) -> tuple[list[tuple[Action, float, float]], float]:
        """The actions with begin and end, and how long it took altogether; waits for a GPU that is still at work."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._marks]
        return found, self._seconds(self._last) - self._started

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(self._first, torch.cuda.Event)
        assert isinstance(mark, torch.cuda.Event)
        return self._started + self._first.elapsed_time(mark) / 1000
