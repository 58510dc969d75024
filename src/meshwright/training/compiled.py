"""What became of layers that were to be compiled: known once a first step has compiled them."""

from __future__ import annotations

from meshwright.parallel.compile import breaks
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class TellBreaks(Hook):
    """An event after the first step of compiled layers: how long that took, and where they fell apart."""

    def __init__(self) -> None:
        self._told = False

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self._told or not trainer.one_step.compiled:
            return
        self._told = True
        trainer.breaks = breaks()
        if trainer.world.is_first:
            seconds = round(metrics["step_s"], 3)
            trainer.job.folder.event("compiled", step=trainer.step, seconds=seconds, breaks=trainer.breaks)
