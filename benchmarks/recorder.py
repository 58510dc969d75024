"""What recording costs a training: its own calls in every step, and the steps that run under a profiler.

Trains on two ranks over gloo, as users would, models and batches from short steps to longer ones, and prints what the
ranks have recorded of it: how long steps took, what the recorder took of a step (its calls, and the thread that
writes), the median step, and which share that is; the share over all steps, with what calls waited for a core; how much
longer profiled steps took; and how much time was not attributed to any part. Exits with 1 if the recorder's share of
the median step is 0.5% or more, for steps from 15 ms on.

    python benchmarks/recorder.py [--steps 300] [--sizes tiny-1 demo-2] [--every 50] [--strategies "dp=2" "dp=2 zero=3"]
    python benchmarks/recorder.py --against ../other/src --rounds 3

`--against` trains with another source tree as well, in turns, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table

MOST = 0.005
"""The share of a step that the recorder may take, ..."""
SHORTEST_S = 0.015
"""... of steps that are no shorter."""

SIZES = {
    "tiny-1": ["model.preset=tiny", "model.spec.num_hidden_layers=1", "train.global_batch=4"],
    "tiny-2": ["model.preset=tiny", "model.spec.num_hidden_layers=2", "train.global_batch=8"],
    "tiny-8": ["model.preset=tiny", "train.global_batch=8"],
    "demo-4": ["train.global_batch=4"],
    "demo-16": ["train.global_batch=16"],
}
"""Models and batches, by the length of their steps."""

Lines = list[dict[str, Any]]


def train(folder: Path, size: str, strategy: str, steps: int, every: int, source: Path | None) -> list[Lines]:
    """The lines of both ranks."""
    with tempfile.TemporaryDirectory(dir=folder) as run:
        overrides = {
            "run.dir": f"{run}/run",
            "data.path": folder / "corpus",
            "parallel.strategy": strategy,
            "train.steps": steps,
            "train.eval_every": 0,
            "checkpoint.every": 0,
            "observe.profile_every": every,
        }
        command = [sys.executable, "-m", "meshwright", "train", "--preset", "demo", "--nproc", "2", *SIZES[size]]
        command += [f"{name}={value}" for name, value in overrides.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if source is not None:
            environment["PYTHONPATH"] = str(source.resolve())
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        paths = [Path(run) / "run/ranks" / f"{rank:05d}.jsonl" for rank in range(2)]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def row(ranks: list[Lines], every: int) -> tuple[list[str], float, float]:
    """A row of the table; the recorder's median share and the median step's seconds, of the rank where it is larger."""
    shares, means, costs, lost, usual = [], [], [], [], []
    for lines in ranks:
        # The first steps make what lives on.
        steps = [line for line in lines if line["kind"] == "step" and line["step"] > 5]
        stretches = [line for line in lines if line["kind"] == "recorder" and line["step"] > 5]
        seconds = sum(line["seconds"] for line in steps)
        middle = statistics.median(line["seconds"] for line in steps if "profiled" not in line)
        profiled = [line["profiler_s"] for line in lines if "profiler_s" in line]
        shares.append(statistics.median(line["usual_s"] for line in stretches) / middle)
        means.append(sum(line["inside_s"] for line in stretches) / seconds)
        costs.append(statistics.median(profiled) / (every * middle) if profiled else 0.0)
        lost.append(sum(line["parts"].get("unattributed", 0.0) for line in steps) / seconds)
        usual.append(middle)
    share, step_s = max(shares), max(usual)
    texts = [f"{1e3 * step_s:.1f} ms", f"{share:.3%}", f"{max(means):.3%}", f"{1e6 * share * step_s:.0f} us"]
    return [*texts, f"{max(costs):.2%}", f"{max(lost):.3%}"], share, step_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models and batches")
    parser.add_argument("--every", type=int, default=50, help="steps between two that are profiled")
    parser.add_argument("--strategies", nargs="+", default=["dp=2"])
    parser.add_argument("--rounds", type=int, default=1, help="how often all are trained; their steps count together")
    parser.add_argument("--against", type=Path, help="the folder `src` of another version to train with, too")
    arguments = parser.parse_args()
    sources = {"": None} | ({"other": arguments.against} if arguments.against else {})
    cases = list(product(arguments.sizes, arguments.strategies, sources))
    found: dict[tuple[str, str, str], list[Lines]] = {case: [[], []] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for _, case in product(range(arguments.rounds), cases):
            size, strategy, name = case
            trained = train(Path(folder), size, strategy, arguments.steps, arguments.every, sources[name])
            for kept, lines in zip(found[case], trained, strict=True):
                kept += lines
    columns = ["step", "recorder", "over all", "of a step", f"profiling 1 in {arguments.every}", "unattributed"]
    table = Table("size", "strategy", *(["source"] if arguments.against else []), *columns)
    highest = 0.0
    for (size, strategy, name), ranks in found.items():
        texts, share, step_s = row(ranks, arguments.every)
        table.add_row(size, strategy, *([name or "this"] if arguments.against else []), *texts)
        if not name and step_s >= SHORTEST_S:
            highest = max(highest, share)
    # As wide as it is, also in a file.
    Terminal(width=120).print(table)
    if highest >= MOST:
        raise SystemExit(f"the recorder took {highest:.2%} of the time; it may take {MOST:.1%}")


if __name__ == "__main__":
    main()
