"""How gradients travel, as far as it is known only at the start: told on the first rank's console."""

from __future__ import annotations

from meshwright.comm.compression import NONE, Compression
from meshwright.models.shapes import shapes_of
from meshwright.training.hooks import Hook
from meshwright.training.loop import TrainingLoop


class TellTravel(Hook):
    """A line for what was measured, and one for compression that saves nothing, or that does not begin."""

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first or trainer.finished:
            return
        parallel = trainer.one_step.parallel
        found = parallel.travel.bucket_mb
        if trainer.config.comm.bucket_mb == "auto" and found is not None:
            print(f"comm   comm.bucket_mb=auto measured what sums take, and chose {found:.4g} MiB", flush=True)
        strategy, shapes = trainer.job.strategy, list(shapes_of(trainer.job.spec).values())
        element = parallel.precision.reduce.itemsize
        vain = Compression.parse(strategy.compress).in_vain(shapes, strategy.dp, element)
        if vain is not None:
            print(f"comm   {vain}", flush=True)
        after, steps = trainer.config.comm.compress_after, trainer.config.train.steps
        if strategy.compress != NONE and after >= steps:
            print(
                f"comm   comm.compress_after={after} is not before train.steps={steps}: nothing is compressed",
                flush=True,
            )
