"""Step time of the trainer against a hand-written PyTorch loop of the same model and batch, on one CPU process.

The trainer runs as it does for users (prefetching, metrics, TensorBoard files, console lines). After every block of its
steps the hand-written loop runs as many, so that both meet the same machine; blocks alternate in who goes first.
Prints each model's ratio with a 95% interval (bootstrap over blocks).

    python benchmarks/step_overhead.py [--blocks 20] [--steps 5] [--models demo tiny]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from rich.console import Console as Terminal
from rich.table import Table

from meshwright.config import load_config
from meshwright.data.prepare import prepare
from meshwright.models.initialize import build
from meshwright.observe.console import Console
from meshwright.observe.records import Records
from meshwright.observe.tensorboard import TensorBoard
from meshwright.training.hooks import Events, Hook, Metrics, StopOnSignal
from meshwright.training.loop import TrainingLoop
from meshwright.training.recover import Recover
from meshwright.training.replicas import CheckReplicas

SHAPES = {"demo": (8, 256), "tiny": (16, 64)}
"""Batch and sequence length of each model."""


def hand_written(trainer: TrainingLoop) -> Iterator[float]:
    """What a person would write in a notebook, on batches that lie ready in memory."""
    train = trainer.config.train
    model = build(trainer.job.spec, seed=1).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay, fused=True
    )
    batches = [torch.from_numpy(trainer.job.sampler.rows(8 * n, train.global_batch)) for n in range(8)]
    for step in range(10**9):
        tokens = batches[step % len(batches)]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


class Interleave(Hook):
    """Times blocks of the trainer's own steps and runs the hand-written loop between them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.pairs: list[tuple[float, float]] = []
        self.waiting: float | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        self.bare = hand_written(trainer)
        self._run_bare()
        self.started = time.perf_counter()

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if trainer.step % self.steps:
            return
        own = time.perf_counter() - self.started
        block = trainer.step // self.steps
        # Block 0 warms up. Odd blocks: trainer first; even blocks: the bare time was taken before the trainer's.
        if block > 1:
            if block % 2:
                self.pairs.append((own, self._run_bare()))
            else:
                assert self.waiting is not None
                self.pairs.append((own, self.waiting))
        self.waiting = self._run_bare() if block % 2 else None
        self.started = time.perf_counter()

    def _run_bare(self) -> float:
        started = time.perf_counter()
        for _ in range(self.steps):
            next(self.bare)
        return time.perf_counter() - started


def measure(name: str, corpus: Path, folder: Path, blocks: int, steps: int) -> list[tuple[float, float]]:
    """Pairs of block times (trainer, hand-written) for one model."""
    batch, length = SHAPES[name]
    settings = {
        "run.dir": folder / name,
        "run.device": "cpu",
        "model.preset": name,
        "data.path": corpus,
        "data.sequence_length": length,
        "train.steps": (blocks + 1) * steps,
        "train.global_batch": batch,
        "train.eval_sequences": 0,
    }
    interleave = Interleave(steps)
    console = Console(Terminal(file=io.StringIO()))
    hooks = [Events(), StopOnSignal(), Recover(), CheckReplicas(), Records(), TensorBoard(), console, interleave]
    TrainingLoop(load_config(None, [f"{key}={value}" for key, value in settings.items()]), hooks=hooks).train()
    return interleave.pairs


def interval(pairs: list[tuple[float, float]], rounds: int = 10_000) -> tuple[float, float, float]:
    """The median of the blocks' ratios and its 95% interval by bootstrap."""
    draw = random.Random(0)
    ratios = [own / bare for own, bare in pairs]
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return statistics.median(ratios), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks (default 20)")
    parser.add_argument("--steps", type=int, default=5, help="steps a block (default 5)")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"trainer / hand-written loop, torch {torch.__version__}, 1 thread")
    for column in ("model", "batch", "blocks", "trainer ms/step", "bare ms/step", "ratio", "95% interval"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus"
        prepare(["python-stdlib"], corpus, "bytes")
        for name in options.models:
            pairs = measure(name, corpus, Path(scratch), options.blocks, options.steps)
            own, bare = (statistics.median(times) * 1000 / options.steps for times in zip(*pairs, strict=True))
            middle, low, high = interval(pairs)
            shape = "{} x {}".format(*SHAPES[name])
            cells = (f"{own:.1f}", f"{bare:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
            table.add_row(name, shape, str(len(pairs)), *cells)
    Terminal().print(table)


if __name__ == "__main__":
    main()
