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
        self._spikes: deque[bool] = deque(maxlen=WINDOW)
        self._memory: RankMemory | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        length = trainer.config.data.sequence_length
        self._flops_per_token = training_flops(trainer.job.spec, length, length) / length
        self._memory = RankMemory(trainer.world.device)
        chip = chip_of(trainer.world.device)
        if chip is not None and trainer.world.sharing is None:
            # With 8 bits most products but not all are faster: plans, too, count by the wider dtype.
            precision = trainer.config.train.precision
            self._peak = chip.tflops.get("bf16" if precision == "fp8" else precision, 0.0)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        entered = time.perf_counter()
        speed = metrics["tokens_per_s"] / trainer.world.size
        tflops = speed * self._flops_per_token / 1e12
        metrics["time"] = round(time.time(), 3)
        metrics["tokens_per_s_per_device"] = speed
        metrics["tflops_per_device"] = tflops
        if self._peak:
            metrics["mfu"] = tflops / self._peak
        if self._memory is not None:
            metrics["peak_memory_gib"] = self._memory.peak() / 2**30
        # Both are asked: each must see every step.
        spikes = [self._losses.is_spike(metrics.get("loss")), self._norms.is_spike(metrics.get("grad_norm"))]
        self._spikes.append(any(spikes))
        metrics["spike_score"] = sum(self._spikes) / len(self._spikes)
        self._inside += time.perf_counter() - entered

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def take_inside(self) -> float:
        """The seconds spent here since this was last asked."""
        spent, self._inside = self._inside, 0.0
        return spent

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self._losses, self._norms = Restless(), Restless()
        self._spikes.clear()


class Restless:
    """Tells values that lie far above those before them."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, value: float | None) -> bool:
        """Whether this one does; from then on it is one of those before. None, which is no number, is none of them."""
        if value is None:
            return False
        before, spike = self._before, False
        if len(before) >= FEWEST:
            mean = sum(before) / len(before)
            variance = math.hypot(*before) ** 2 / len(before) - mean**2
            deviation = max(math.sqrt(max(0.0, variance)), LEAST_DEVIATION * abs(mean))
            spike = value > mean + DEVIATIONS * deviation
        before.append(value)
        return spike


def chip_of(device: torch.device) -> Chip | None:
    """The chip that a GPU is, where it is a known one."""
    if device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory / 2**20
    return chip_named(torch.cuda.get_device_name(device), memory)
