"""What became of layers that were to be compiled: known once a step has compiled them."""

from __future__ import annotations

from meshwright.parallel.compile import breaks
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class TellBreaks(Hook):
    """An event after the first step of compiled layers: how long that took, and where they fell apart. Another one
    after a step that has found further reasons: other lengths of sequences and batches are compiled when they come."""

    def __init__(self) -> None:
        self._told = False

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if not trainer.one_step.compiled:
            return
        found = breaks()
        if self._told and found.keys() <= trainer.breaks.keys():
            return
        self._told = True
        trainer.breaks = found
        if trainer.world.is_first:
            seconds = round(metrics["step_s"], 3)
            trainer.job.folder.event("compiled", step=trainer.step, seconds=seconds, breaks=trainer.breaks)
