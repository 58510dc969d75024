"""What is added to the metrics of a step: speed of each device, how well it is used, memory, how restless a run is."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from meshwright.cluster.chips import Chip
from meshwright.cluster.cluster import chip_named
from meshwright.observe.rank_memory import RankMemory
from meshwright.planning.blocks import training_flops
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

WINDOW = 128
"""Steps that a spike score looks back."""

DEVIATIONS = 6.0
"""How far above the mean of the window a loss or a gradient norm is a spike."""

FEWEST = 16
"""Steps from which a deviation is known."""

LEAST_DEVIATION = 1e-3
"""The smallest one, relative to the mean: in a flat series a millionth more is no spike."""


class StepMetrics(Hook):
    """Adds them on every rank; comes before those who record metrics."""

    def __init__(self) -> None:
        self._inside = 0.0
        self._flops_per_token = 0.0
        self._peak = 0.0
        self._losses, self._norms = Restless(), Restless()
        self._spikes = Recent()
        self.memory: RankMemory | None = None
        """Of this rank, for who else wants to know."""

    def at_start(self, trainer: TrainingLoop) -> None:
        length = trainer.config.data.sequence_length
        self._flops_per_token = training_flops(trainer.job.spec, length, length) / length
        self.memory = RankMemory(trainer.world.device)
        chip = chip_of(trainer.world.device)
        if chip is not None and trainer.world.sharing is None:
            # With 8 bits most products but not all are faster: plans, too, count by the wider dtype.
            precision = trainer.config.train.precision
            self._peak = chip.tflops.get("bf16" if precision == "fp8" else precision, 0.0)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        entered = time.perf_counter()
        speed = metrics["tokens_per_s"] / trainer.world.size
        tflops = speed * self._flops_per_token / 1e12
        # To the millisecond; round() takes as long as all else here.
        metrics["time"] = time.time_ns() // 1_000_000 / 1000
        metrics["tokens_per_s_per_device"] = speed
        metrics["tflops_per_device"] = tflops
        if self._peak:
            metrics["mfu"] = tflops / self._peak
        if self.memory is not None:
            metrics["peak_memory_gib"] = self.memory.peak() / 2**30
        # Both are asked: each must see every step.
        loss, norm = self._losses.is_spike(metrics.get("loss")), self._norms.is_spike(metrics.get("grad_norm"))
        metrics["spike_score"] = self._spikes.share_with(loss or norm)
        self._inside += time.perf_counter() - entered

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()

    def take_inside(self) -> float:
        """The seconds spent here since this was last asked."""
        spent, self._inside = self._inside, 0.0
        return spent

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self._losses, self._norms = Restless(), Restless()
        self._spikes = Recent()


class Recent:
    """Counts how many of the last WINDOW steps were such."""

    def __init__(self) -> None:
        self._steps: deque[bool] = deque(maxlen=WINDOW)
        self._count = 0

    def share_with(self, such: bool) -> float:
        """The share of them, with the one that has just ended."""
        if len(self._steps) == WINDOW:
            self._count -= self._steps[0]
        self._steps.append(such)
        self._count += such
        return self._count / len(self._steps)


class Restless:
    """Tells values that lie far above those before them."""

    def __init__(self) -> None:
        self._before = Window()

    def is_spike(self, value: float | None) -> bool:
        """Whether this one does; from then on it is one of those before. None, which is no number, is none of them."""
        if value is None:
            return False
        count, total, squares = self._before.sums()
        spike = False
        if count >= FEWEST:
            mean = total / count
            variance = squares / count - mean * mean
            deviation = max(math.sqrt(max(0.0, variance)), LEAST_DEVIATION * abs(mean))
            spike = value > mean + DEVIATIONS * deviation
        self._before.add(value)
        return spike


class Window:
    """The sums of the last WINDOW values and of their squares, in the same time however many those are.

    Nothing is ever taken away from a sum: after a leap that would leave its rounding error for good. Values come to a
    block. When that is full, it is added up from its newest value to each of the others; what goes out of the window
    takes its sum along, while the next block grows.
    """

    def __init__(self) -> None:
        self._block: list[float] = []
        self._total, self._squares = 0.0, 0.0
        """Sums of the block."""
        self._until: list[tuple[float, float]] = []
        """Sums of the block before, of what is left of it: the last is that of all, from the oldest value on."""

    def sums(self) -> tuple[int, float, float]:
        """How many values, their sum, and that of their squares."""
        total, squares = self._until[-1] if self._until else (0.0, 0.0)
        return len(self._block) + len(self._until), total + self._total, squares + self._squares

    def add(self, value: float) -> None:
        """The next value; the oldest one goes where there are too many."""
        if len(self._block) == WINDOW:
            total, squares = 0.0, 0.0
            for one in reversed(self._block):
                total, squares = total + one, squares + one * one
                self._until.append((total, squares))
            self._block, self._total, self._squares = [], 0.0, 0.0
        if self._until:
            self._until.pop()
        self._block.append(value)
        self._total, self._squares = self._total + value, self._squares + value * value


def chip_of(device: torch.device) -> Chip | None:
    """The chip that a GPU is, where it is a known one."""
    if device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory / 2**20
    return chip_named(torch.cuda.get_device_name(device), memory)
