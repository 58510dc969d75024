"""Weights & Biases: each step's metrics, under the tags that TensorBoard gets too."""

from __future__ import annotations

from typing import Any

from meshwright.observe.tensorboard import TAGS
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class WeightsAndBiases(Hook):
    """Sends metrics to the wandb run that its own environment variables (WANDB_PROJECT, WANDB_MODE, ...) describe."""

    def __init__(self) -> None:
        self.run: Any = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first:
            return
        import wandb

        folder = trainer.job.folder.path
        self.run = wandb.init(name=folder.name, dir=str(folder), config=trainer.config.model_dump())

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self.run is not None:
            values = {tag: metrics[name] for name, tag in TAGS.items() if name in metrics}
            self.run.log(values, step=trainer.step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
