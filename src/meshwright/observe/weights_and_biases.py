"""Weights & Biases: each step's metrics, under the tags that TensorBoard gets too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.observe.export import PATIENCE_S, Exporter, Record
from meshwright.secrets import public
from meshwright.training.loop import TrainingLoop


class WeightsAndBiases(Exporter):
    """Sends metrics to the wandb run that its own environment variables (WANDB_PROJECT, WANDB_MODE, ...) describe."""

    name = "Weights & Biases"

    def __init__(self, trainer: TrainingLoop) -> None:
        # Here and not on the thread: an import would hold up steps.
        import wandb

        self._wandb = wandb
        folder = trainer.job.folder.path
        self._arguments = {"name": folder.name, "dir": str(folder), "config": public(trainer.config.model_dump())}
        self._run: Any = None

    def open(self) -> None:
        settings = self._wandb.Settings(
            # Command line, console and code may hold what is nobody's business; metrics and settings are what is sent.
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            # A process that ends waits for its service no longer than the queue does.
            finish_timeout=PATIENCE_S + 1,
        )
        self._run = self._wandb.init(**self._arguments, settings=settings)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(record.values, step=record.step)

    def close(self, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)
