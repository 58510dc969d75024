"""metrics.jsonl: a line a step, whole or not there, written by the first rank."""

from __future__ import annotations

import json
from typing import TextIO

from meshwright.train.hooks import Hook, Metrics
from meshwright.train.loop import TrainingLoop


class Records(Hook):
    """Appends each step's metrics to the run folder."""

    def __init__(self) -> None:
        self.file: TextIO | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first:
            self.file = trainer.job.folder.metrics.open("a")

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self.file is not None:
            self.file.write(json.dumps(dict(metrics)) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
