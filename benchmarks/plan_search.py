"""How long the planner takes: a search on 64 and on 4,096 chips, and `meshwright plan` from start to answer.

    python benchmarks/plan_search.py [--repeats 5] [--json OUT]

Each search runs in a process of its own, so that nothing is remembered from the one before; processor seconds of that
process, without its start. The command is timed by the clock, with the start of Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL, LENGTH = "llama3.1-70b", 8192
SEARCHES = {64: 512, 4096: 4096}
"""Chips and global batch."""
LIMITS = {"search on 64": 0.3, "search on 4096": 2.0, "command": 1.0}

_SEARCH = """
import sys, time
from meshwright.cluster.cluster import parse_cluster
from meshwright.models.presets import preset
from meshwright.planning.question import Question
from meshwright.planning.search import search
gpus, batch = int(sys.argv[1]), int(sys.argv[2])
question = Question(preset(sys.argv[3]), parse_cluster(f"{gpus}xh100"), int(sys.argv[4]), batch)
started = time.process_time()
found = search(question)
print(time.process_time() - started, found.estimated, found.bounded, found.best.strategy, sep="\\t")
"""


def search_seconds(gpus: int, batch: int) -> tuple[float, str]:
    """Processor seconds of one search, and what it found."""
    command = [sys.executable, "-c", _SEARCH, str(gpus), str(batch), MODEL, str(LENGTH)]
    seconds, estimated, bounded, best = subprocess.check_output(command, text=True).rstrip().split("\t")
    return float(seconds), f"{best} ({estimated} estimated, {bounded} degrees bounded)"


def command_seconds() -> float:
    """Wall seconds of the command."""
    command = [sys.executable, "-m", "meshwright", "plan", "--model", MODEL, "--cluster", "64xh100", "--json"]
    started = time.perf_counter()
    subprocess.check_output([*command, "--seq-len", str(LENGTH)])
    return time.perf_counter() - started


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    args = parser.parse_args()
    taken: dict[str, list[float]] = {}
    for gpus, batch in SEARCHES.items():
        pairs = [search_seconds(gpus, batch) for _ in range(args.repeats)]
        taken[f"search on {gpus}"] = [seconds for seconds, _ in pairs]
        print(f"{gpus} chips: {pairs[0][1]}")
    taken["command"] = [command_seconds() for _ in range(args.repeats)]
    figures = {name: round(statistics.median(each), 3) for name, each in taken.items()}
    for name, seconds in figures.items():
        spread = f"{min(taken[name]):.3f} to {max(taken[name]):.3f}"
        print(f"{name:<16} {seconds:.3f} s (median of {args.repeats}, {spread}; at most {LIMITS[name]:g} wanted)")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if all(figures[name] <= limit for name, limit in LIMITS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
