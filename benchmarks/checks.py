"""What the checks of a run's numbers cost on two CPU ranks: copies compared, NaN looked for before a save, the ledger.

    python benchmarks/checks.py [--repeats 20] [--models demo tiny]

A step is timed beside them, so that all meet the same machine. Prints milliseconds a call (median), and what share of a
step it is at the default cadence: copies every elastic.check_replicas_every=100 steps, NaN every checkpoint.every=500,
the ledger every step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console as Terminal
from rich.table import Table

from meshwright.config import load_config
from meshwright.data.prefetch import Prefetcher
from meshwright.data.prepare import prepare
from meshwright.observe.ledger import Ledger
from meshwright.parallel.world import World
from meshwright.training.held_state import assert_finite
from meshwright.training.loop import TrainingLoop
from meshwright.training.replicas import ReplicaCheck
from meshwright.verify.pool import RankPool

SHAPES = {"demo": (8, 256), "tiny": (16, 64)}
"""Batch and sequence length of each model."""
CADENCE = {"copies": 100, "finite": 500, "ledger": 1}


def measure(world: World, name: str, corpus: Path, folder: Path, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step and of each check."""
    batch, length = SHAPES[name]
    settings = {
        "run.dir": folder / name,
        "model.preset": name,
        "data.path": corpus,
        "data.sequence_length": length,
        "train.global_batch": batch,
        "observe.ledger": "true",
    }
    loop = TrainingLoop(load_config(None, [f"{key}={value}" for key, value in settings.items()]), world)
    ledger, check = Ledger(), ReplicaCheck(world)
    ledger.at_start(loop)
    with Prefetcher(loop.make_batch, 0, repeats + 3) as batches:
        times: dict[str, list[float]] = {"step": [], "copies": [], "finite": [], "ledger": []}
        for step, held in batches:
            work: dict[str, Callable[[], object]] = {
                "step": partial(loop.train_step, step, held),
                "copies": partial(check, loop.model, loop.optimizer),
                "finite": partial(assert_finite, loop.model, loop.optimizer, world),
                "ledger": partial(ledger.after_step, loop, {}),
            }
            for kind, one in work.items():
                started = time.perf_counter()
                one()
                times[kind].append(time.perf_counter() - started)
    ledger.close()
    # The first calls find out who holds what.
    return {kind: 1000 * statistics.median(values[3:]) for kind, values in times.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="steps measured (default 20)")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    table = Table(title="two ranks, dp=2, float32, AdamW: ms a call, and share of a step at the default cadence")
    for column in ("model", "step", "copies", "looking for NaN", "ledger"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as scratch, RankPool(2) as pool:
        corpus = Path(scratch) / "corpus"
        prepare(["python-stdlib"], corpus, "bytes")
        for name in options.models:
            found = pool.run(measure, 2, name, corpus, Path(scratch), options.repeats)[0]
            shares = {kind: 100 * found[kind] / every / found["step"] for kind, every in CADENCE.items()}
            cells = [f"{found[kind]:.2f} ({share:.3f}%)" for kind, share in shares.items()]
            table.add_row(name, f"{found['step']:.1f}", *cells)
    Terminal(width=120).print(table)


if __name__ == "__main__":
    main()
