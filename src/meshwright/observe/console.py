"""What a person sees while a run goes on: what really runs, a progress display, and what to do next.

On a terminal a bar that stays in place; elsewhere a line every observe.log_every steps.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from meshwright.models.count import count_parameters
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop
from meshwright.training.slow_attention import slow_attention


class Console(Hook):
    """The run on the first rank's console."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self.terminal = terminal or Terminal(highlight=False, markup=False)
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.started = 0.0
        self.last_eval: float | None = None
        self.told_breaks: set[str] = set()

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first:
            return
        self.started = time.monotonic()
        self._say(introduction(trainer))
        if self.terminal.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.terminal, expand=True)
            total = trainer.config.train.steps
            self.task = self.progress.add_task("", total=total, completed=trainer.step, numbers="starting")
            self.progress.start()

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if not trainer.world.is_first:
            return
        self.last_eval = metrics.get("eval_loss", self.last_eval)
        new = {reason: count for reason, count in trainer.breaks.items() if reason not in self.told_breaks}
        if new:
            self.told_breaks |= new.keys()
            self._say(in_pieces(new))
        if self.progress is not None:
            self.progress.update(self.task, completed=trainer.step, numbers=numbers(metrics, self.last_eval))
            if trainer.finished or trainer.stopping:
                self.close()
            return
        last = trainer.finished or trainer.stopping
        if trainer.step % trainer.config.observe.log_every == 0 or last or "eval_loss" in metrics:
            done = trainer.step - (trainer.resumed_from.step if trainer.resumed_from else 0)
            left = (time.monotonic() - self.started) / done * (trainer.config.train.steps - trainer.step)
            steps = f"step {trainer.step}/{trainer.config.train.steps}"
            line = f"{steps}  {numbers(metrics, metrics.get('eval_loss'))}  ETA {clock(left)}"
            self._say(line)

    def at_end(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first:
            return
        if not trainer.worked:
            self._say(f"this run is already at step {trainer.step}; raise train.steps to go on with it")
            return
        why = "finished" if trainer.finished else f"stopped at step {trainer.step} ({trainer.stop_reason})"
        took = clock(time.monotonic() - self.started)
        before = trainer.resumed_from
        since = f"{took} after going on from step {before.step}" if before else f"after {took}"
        folder = trainer.job.folder
        self._say(f"{why} {since}; everything is in {folder.path}")
        if trainer.finished:
            self._say(f'next: meshwright generate {shlex.quote(str(folder.path))} "your prompt"')
        else:
            ranks = f" --nproc {trainer.world.size}" if trainer.world.size > 1 else ""
            self._say(f"next: meshwright train {shlex.quote(str(folder.config))}{ranks} goes on from there")

    def _say(self, text: str) -> None:
        """Print a line; a reader that has gone away must not end the training."""
        try:
            print(text, file=self.terminal.file, flush=True)
        except BrokenPipeError:
            # Whatever is still to be printed, here or when Python ends, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            sys.stdout.flush()


def introduction(trainer: TrainingLoop) -> str:
    """What this run really is, in three lines, and why its strategy was chosen."""
    job, config = trainer.job, trainer.config
    count = count_parameters(job.spec)
    active = f" ({human(count.active)} active)" if count.active != count.total else ""
    name = config.model.preset or config.model.from_hf or "model"
    ranks = "1 process" if trainer.world.size == 1 else f"{trainer.world.size} processes over {trainer.world.backend}"
    batches = sorted(job.batches.sizes())
    batch = str(batches[0]) if len(batches) == 1 else f"{batches[0]}..{batches[-1]}"
    corpora = " + ".join(f"{corpus.path}: {human(corpus.tokens)} tokens" for corpus in job.sampler.corpora)
    start = f"from step {trainer.step} " if trainer.step else ""
    on_cpu = {"fp16": "; fp16 is slow on a CPU", "tf32": "; on a CPU that is plain float32"}
    slow = on_cpu.get(config.train.precision, "") if trainer.world.device.type == "cpu" else ""
    wide = "".join(f"\nbf16   {line}" for line in kept_wide(trainer.one_step.parallel.wide))
    reason = slow_attention(config, job.spec, job.strategy, trainer.world.device)
    attention = f"\nslow   attention {reason}" if reason is not None else ""
    why = "".join(f"\nplan   {line}" for line in trainer.planned.said)
    shared = f"\nshared {trainer.world.sharing}" if trainer.world.sharing is not None else ""
    return (
        f"model  {name}: {human(count.total)} parameters{active}, {config.train.precision}{slow}\n"
        f"data   {corpora}; tokenizer {job.tokenizer.name}\n"
        f"run    {ranks} on {trainer.world.device}, {job.strategy}; "
        f"{start}to step {config.train.steps} with {batch} x {config.data.sequence_length} tokens each"
        f"{shared}{wide}{attention}{why}"
    )


def in_pieces(breaks: Mapping[str, int]) -> str:
    """What the compiler could not take in one piece, or at all; it is right, and slower than it could be."""
    reasons = "; ".join(f"{reason} ({count} x)" for reason, count in breaks.items())
    return f"compiled layers run in pieces: {reasons}"


def kept_wide(reasons: Mapping[str, str]) -> list[str]:
    """What a run in fp8 leaves in bf16, that of all layers as one."""
    alike = Counter((re.sub(r"\.\d+\.", ".*.", name), reason) for name, reason in reasons.items())
    return [f"{name}{f' ({count} of them)' * (count > 1)}, {reason}" for (name, reason), count in alike.items()]


def numbers(metrics: Metrics, eval_loss: float | None) -> str:
    """The figures of a step in one line."""
    evaluated = f"  held-out {eval_loss:.4f}" if eval_loss is not None else ""
    loss = f"loss {metrics['loss']:.4f}" if "loss" in metrics else "loss overflows"
    norm = f"grad norm {metrics['grad_norm']:.2f}" if "grad_norm" in metrics else "gradients overflow"
    skipped = "  skipped" if metrics.get("skipped") else ""
    if skipped and "loss_scale" in metrics:
        skipped += f" at loss scale {metrics['loss_scale']:g}"
    return f"{loss}{evaluated}  {norm}{skipped}  lr {metrics['lr']:.1e}  {metrics['tokens_per_s']:,.0f} tokens/s"


def human(count: float) -> str:
    """A count in thousands, millions or billions."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:g}"


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
