"""When steps end, and the most memory in use, without holding up the device: a GPU's clock is read afterwards."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Clock:
    """Takes the time at the borders of steps."""

    def __init__(self, device: torch.device, started: float) -> None:
        """`started` is the monotonic time at which the process was asked for."""
        self.device, self._started = device, started
        self._stamps: list[float | torch.cuda.Event] = []
        self._losses: list[Tensor | float] = []
        self._peak = 0
        self._aside = 0.0
        self.first_step_s = 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work for the comparison's sake, which does not count as the start of a training."""
        started = time.monotonic()
        yield
        self._wait()
        self._aside += time.monotonic() - started

    def begin(self) -> None:
        """The model is there; the first step comes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._stamp()

    def stepped(self, loss: Tensor | float) -> None:
        """A step was given to the device."""
        self._stamp()
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if self.device.type == "cuda":
            # Some trainers start the count anew now and then.
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))
        if not self.first_step_s:
            self._wait()
            self.first_step_s = time.monotonic() - self._started - self._aside

    def step_ms(self) -> list[float]:
        """Of every step, from the end of the one before to its own."""
        self._wait()
        return [_between(*pair) for pair in zip(self._stamps, self._stamps[1:], strict=False)]

    def losses(self) -> list[float]:
        """Of every step."""
        return [float(loss) for loss in self._losses]

    def peak_bytes(self) -> float:
        """Of tensors on a GPU; on a CPU of the whole process."""
        if self.device.type == "cuda":
            return float(self._peak)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def _stamp(self) -> None:
        if self.device.type != "cuda":
            self._stamps.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._stamps.append(event)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _between(one: float | torch.cuda.Event, other: float | torch.cuda.Event) -> float:
    if isinstance(one, torch.cuda.Event):
        assert isinstance(other, torch.cuda.Event)
        return one.elapsed_time(other)
    assert isinstance(other, float)
    return 1e3 * (other - one)
