"""Python's garbage collection, kept out of the steps: ranks would stop for it one by one, and wait for each other.

What there is once a first step is done lives to the end and is not looked through again; the rest is collected by all
ranks together, between two steps.
"""

from __future__ import annotations

import gc

from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class CollectGarbage(Hook):
    """Collects every train.gc_every steps, and not in between; 0 leaves it to Python."""

    def __init__(self) -> None:
        self._every = 0
        self._first = True
        self._was_enabled = False
        self._was_frozen = False

    def at_start(self, trainer: TrainingLoop) -> None:
        self._every = trainer.config.train.gc_every
        if self._every:
            self._was_enabled, self._was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
            gc.disable()
            self._collect_and_freeze()

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if not self._every:
            return
        if self._first:
            # It has made what lives on: the optimizer's state, compiled code, buffers of communication.
            self._first = False
            self._collect_and_freeze()
        elif trainer.step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        if not self._every:
            return
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._every = 0

    @staticmethod
    def _collect_and_freeze() -> None:
        gc.collect()
        gc.freeze()
