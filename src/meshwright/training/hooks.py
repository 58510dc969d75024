"""What happens around the steps: stop requests, evaluation, early stop. Recording lives in `observe`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from meshwright.training.slow_attention import slow_attention

if TYPE_CHECKING:
    from meshwright.training.loop import TrainingLoop

Metrics = MutableMapping[str, float]


class Hook:
    """Something that happens around the steps, on every rank: in the order of the list, and at the end in reverse."""

    def at_start(self, trainer: TrainingLoop) -> None:
        """Before the first step."""

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        """After each step; what is put into `metrics` is recorded by the hooks that follow."""

    def at_end(self, trainer: TrainingLoop) -> None:
        """After the last step of a run that was not cut off by an error; the last hook first."""

    def before_rollback(self, trainer: TrainingLoop) -> None:
        """Before the state of an earlier checkpoint replaces that of now: finish what still needs it."""

    def at_rollback(self, trainer: TrainingLoop) -> None:
        """The run is back at an earlier step, and state is restored: forget what came after that step."""

    def close(self) -> None:
        """Always, at the very end; the last hook first."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember of this hook."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint remembers."""


class Events(Hook):
    """What the run folder tells of the run as a whole: configuration, tokenizer, when it started, went on, ended."""

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first:
            return
        folder = trainer.job.folder
        if trainer.finished:
            return
        folder.write_config(trainer.planned.asked)
        folder.forget_metrics_after(trainer.step)
        if not folder.tokenizer.exists():
            trainer.job.tokenizer.save(folder.tokenizer)
        kind = "resumed" if trainer.resumed_from else "started"
        measured = trainer.config.comm.bucket_mb == "auto"
        compressed = trainer.one_step.parallel.compressor is not None
        slow = slow_attention(trainer.config, trainer.job.spec, trainer.job.strategy, trainer.world.device)
        folder.event(
            kind,
            step=trainer.step,
            strategy=str(trainer.job.strategy),
            ranks=trainer.world.size,
            device=str(trainer.world.device),
            backend=trainer.world.backend,
            torch=torch.__version__,
            **({"bf16_linears": trainer.one_step.parallel.wide} if trainer.one_step.parallel.wide else {}),
            **({"slow_attention": slow} if slow is not None else {}),
            **({"bucket_mb": trainer.one_step.parallel.travel.bucket_mb} if measured else {}),
            **({"compress_after": max(trainer.one_step.beginning.steps, trainer.step)} if compressed else {}),
        )

    def at_end(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first and trainer.worked:
            kind = "finished" if trainer.finished else "stopped"
            trainer.job.folder.event(kind, step=trainer.step, reason=trainer.stop_reason)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0
"""A stop signal that comes so soon after the first is the same wish: schedulers send it to all processes of a job, and
launchers pass it on to those below them. But for SIGINT: people who press Ctrl-C twice mean it."""
RETUNED = "another strategy is expected to be faster"
"""Why ranks stop that are to be started again with another strategy."""
RESIZE_SIGNAL = signal.SIGUSR1
"""How a launcher asks its ranks to save and end, because other ranks are to go on: any number of times."""


class StopOnSignal(Hook):
    """The first stop signal ends the run after the step in hand and saves; one after its echoes ends it at once."""

    def __init__(self) -> None:
        self.previous: dict[signal.Signals, Any] = {}
        self.asked_at: float | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            if self.asked_at is not None:
                if is_echo(number, self.asked_at):
                    return
                show_cursor()
                os._exit(128 + number)
            self.asked_at = time.monotonic()
            trainer.stop(signal.Signals(number).name)
            if trainer.world.is_first:
                # A handler may interrupt a write of the console's own buffer: go around it.
                with suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), b"\nstopping after this step and saving; again to stop at once\n")

        def resize(number: int, frame: FrameType | None) -> None:
            trainer.stop("machines come or go")

        for number in (*STOP_SIGNALS, RESIZE_SIGNAL):
            handler = resize if number == RESIZE_SIGNAL else handle
            try:
                self.previous[number] = signal.signal(number, handler)
            except ValueError:  # Only a main thread may; a trainer in another thread is stopped through stop().
                return

    def close(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def is_echo(number: int, asked_at: float) -> bool:
    """Whether a stop signal is the one of that moment again."""
    return number != signal.SIGINT and time.monotonic() - asked_at < ECHO_S


def show_cursor() -> None:
    """Give the terminal back its cursor, which a progress bar hides, before an exit that lets nothing else run."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")


class Evaluate(Hook):
    """The loss on the held-out sequences, every train.eval_every steps and at the last one."""

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        every = trainer.config.train.eval_every
        if trainer.finished or (every and trainer.step % every == 0):
            started = time.perf_counter()
            loss = trainer.evaluate()
            if loss is not None:
                metrics["eval_loss"] = loss
                metrics["eval_s"] = time.perf_counter() - started


class EarlyStop(Hook):
    """Stops a run whose held-out loss has not improved for train.early_stop evaluations in a row."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.misses = 0

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if "eval_loss" not in metrics or not trainer.config.train.early_stop:
            return
        if metrics["eval_loss"] < self.best:
            self.best, self.misses = metrics["eval_loss"], 0
            return
        self.misses += 1
        if self.misses >= trainer.config.train.early_stop:
            reason = f"no better evaluation loss than {self.best:.4f} in {self.misses} evaluations"
            trainer.stop(reason, everywhere=True)

    def state(self) -> dict[str, Any]:
        # JSON has no infinity.
        return {"early_stop": {"best": self.best, "misses": self.misses}} if self.best < float("inf") else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        kept = state.get("early_stop", {"best": float("inf"), "misses": 0})
        self.best, self.misses = kept["best"], kept["misses"]
