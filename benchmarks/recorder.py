"""What recording costs a training: its own calls in every step, and the steps that run under a profiler.

Trains the demo model on two ranks over gloo with batches of the given size, as users would, and prints what the ranks
have recorded of it: how long steps took, which share of that was spent in calls of the recorder, how much longer
profiled steps took, and how much time was not attributed to any part. Exits with 1 if the recorder took 0.5% or more.

    python benchmarks/recorder.py [--steps 120] [--samples 4] [--every 20] [--strategies "dp=2" "dp=2 zero=3"]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table

MOST = 0.005
"""The share of a step that the recorder may take."""


def train(folder: Path, strategy: str, steps: int, samples: int, every: int) -> list[list[dict[str, Any]]]:
    """The lines of both ranks."""
    run = folder / strategy.replace(" ", "-")
    overrides = {
        "run.dir": run,
        "data.path": folder / "corpus",
        "parallel.strategy": strategy,
        "train.steps": steps,
        "train.global_batch": samples,
        "train.eval_every": 0,
        "observe.profile_every": every,
    }
    command = [sys.executable, "-m", "meshwright", "train", "--preset", "demo", "--nproc", "2"]
    command += [f"{name}={value}" for name, value in overrides.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    paths = [run / "ranks" / f"{rank:05d}.jsonl" for rank in range(2)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def row(strategy: str, ranks: list[list[dict[str, Any]]], every: int) -> tuple[list[str], float]:
    """A row of the table, and the share of the recorder on the rank where it is largest."""
    shares, costs, lost, usual = [], [], [], []
    for lines in ranks:
        # The first steps make what lives on.
        steps = [line for line in lines if line["kind"] == "step" and line["step"] > 5]
        inside = sum(line["inside_s"] for line in lines if line["kind"] == "recorder" and line["step"] > 5)
        seconds = sum(line["seconds"] for line in steps)
        middle = statistics.median(line["seconds"] for line in steps if "profiled" not in line)
        profiled = [line["profiler_s"] for line in lines if "profiler_s" in line]
        shares.append(inside / seconds)
        costs.append(statistics.median(profiled) / (every * middle))
        lost.append(sum(line["parts"].get("unattributed", 0.0) for line in steps) / seconds)
        usual.append(middle)
    texts = [strategy, f"{1e3 * max(usual):.0f} ms", f"{max(shares):.3%}", f"{max(costs):.2%}", f"{max(lost):.3%}"]
    return texts, max(shares)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples", type=int, default=4, help="sequences of 128 tokens in a step")
    parser.add_argument("--every", type=int, default=20, help="steps between two that are profiled")
    parser.add_argument("--strategies", nargs="+", default=["dp=2", "dp=2 zero=3", "dp=1 pp=2", "dp=1 tp=2"])
    arguments = parser.parse_args()
    table = Table("strategy", "median step", "recorder", f"profiling 1 in {arguments.every}", "unattributed")
    highest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for strategy in arguments.strategies:
            ranks = train(Path(folder), strategy, arguments.steps, arguments.samples, arguments.every)
            texts, share = row(strategy, ranks, arguments.every)
            table.add_row(*texts)
            highest = max(highest, share)
    Terminal().print(table)
    if highest >= MOST:
        raise SystemExit(f"the recorder took {highest:.2%} of the time; it may take {MOST:.1%}")


if __name__ == "__main__":
    main()
