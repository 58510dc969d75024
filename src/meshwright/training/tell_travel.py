"""How gradients travel, as far as it is known only at the start: told on the first rank's console."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.comm.compression import NONE, Compression
from meshwright.comm.whole_steps import early, whole_steps
from meshwright.config import AUTO_STEPS
from meshwright.models.shapes import shapes_of
from meshwright.training.beginning import Beginning
from meshwright.training.hooks import Hook
from meshwright.training.loop import TrainingLoop


class TellTravel(Hook):
    """A line for what was measured, one for when compression begins, and warnings of one that does not pay."""

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
        if strategy.compress != NONE and strategy.dp == 1:
            print(f"comm   compress={strategy.compress} has nothing to do: one rank sends no gradients", flush=True)
        elif strategy.compress != NONE:
            asked, steps = trainer.config.comm.compress_after, trainer.config.train.steps
            for line in when_compressed(strategy.compress, trainer.one_step.beginning, asked, steps, trainer.step):
                print(f"comm   {line}", flush=True)


def when_compressed(kind: str, beginning: Beginning, asked: int | str, steps: int, done: int) -> Iterator[str]:
    """From which step of so many, some of them done, gradients are compressed and why; what it costs if it is early."""
    after, compression = beginning.steps, beginning.compression
    if after >= steps:
        meant = f" is {after} steps, which" if asked == AUTO_STEPS else ""
        yield f"comm.compress_after={asked}{meant} is not before train.steps={steps}: nothing is compressed"
        return
    begins = f"begins with step {after + 1} of {steps}" if after else "begins with the first step"
    if done > after:
        # Steps that are done may have been compressed, or have gone whole under another strategy.
        begins = f"from step {done + 1} of {steps} on"
    yield f"compress={kind} {begins} ({_why(beginning, asked)})"
    warning = early(compression, after, beginning.length)
    if warning is not None:
        auto = whole_steps(compression, beginning.length)
        instead = "" if asked == AUTO_STEPS else f"; comm.compress_after=auto, {auto} here, kept it within 2%"
        yield f"warning: {warning}{instead}"


def _why(beginning: Beginning, asked: int | str) -> str:
    """Where the beginning comes from."""
    setting = f"comm.compress_after={asked}"
    if asked != AUTO_STEPS:
        return setting
    if beginning.settled is not None:
        by_length = whole_steps(beginning.compression, beginning.length)
        moved = f"; a new run of this length would take {by_length}" if beginning.settled != by_length else ""
        return f"{setting}: {beginning.settled}, as it was settled before in this run{moved}"
    if not beginning.compression.remembers:
        return f"{setting}: it leaves nothing over for later steps"
    return f"{setting}: gradients travel whole before, while the loss falls fast; a number of steps sets it"
