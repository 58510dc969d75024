"""metrics.jsonl: a line a step, whole or not there, written by the first rank."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TextIO

from meshwright.errors import CheckpointError
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class Records(Hook):
    """Appends each step's metrics to the run folder."""

    def __init__(self) -> None:
        self.file: TextIO | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first:
            self.file = trainer.job.folder.metrics.open("a")

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self.file is not None:
            trainer.job.folder.check_generation()
            try:
                self.file.write(json.dumps(dict(metrics)) + "\n")
                self.file.flush()
            except OSError as error:
                raise CheckpointError(
                    f"step {trainer.step} cannot be recorded in {trainer.job.folder.metrics}: {error.strerror}; "
                    "make room and start the same command again: it goes on from the latest checkpoint"
                ) from error

    def at_rollback(self, trainer: TrainingLoop) -> None:
        if self.file is not None:
            self.file.close()
            trainer.job.folder.forget_metrics_after(trainer.step)
            self.file = trainer.job.folder.metrics.open("a")

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # What could not be written was told when it was to be written.
                self.file.close()
