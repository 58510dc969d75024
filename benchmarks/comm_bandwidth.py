"""The bandwidth that `meshwright bench comm` reports beside a bare loop over torch.distributed; our ring beside gloo.

In one process for each rank, turn by turn: `bench comm`'s own way to time an all-reduce, and the loop that anybody
would write (a call to warm up, a barrier, n calls, the clock after each). What `bench comm` reports is the median of
calls by when all ranks are done, so the loop's calls are told by the same; what the means of calls say stands beside
it. A ratio is that of the medians of all turns, since single turns on two cores differ by a third; beside it where nine
of ten such ratios lie when turns are drawn again. Then the ring over messages against the backend's own all-reduce.
Exits with 1 where a ratio of what is reported is off by more than 5%, or the ring on 4 ranks reaches less than 0.8 of
the backend.

    python benchmarks/comm_bandwidth.py [--ranks 2 4] [--sizes 64K 1M 16M 64M] [--turns 60]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console as Terminal
from rich.table import Table

from meshwright.bench.collectives import AllReduce
from meshwright.bench.comm import Asked, seconds_of
from meshwright.bench.comm_rows import parse_size
from meshwright.comm.all_reduce import all_reduce
from meshwright.comm.bandwidth import bus_factor
from meshwright.launch.local import run_ranks
from meshwright.parallel.world import World

OFF, RING = 0.05, 0.8
RING_SIZE = 64 << 20
TURN_BYTES = 64 << 20
"""Sizes are summed so often in a turn that about so many bytes were, within bounds."""


class Call(NamedTuple):
    """Seconds of a call in one turn."""

    reported: float
    """The median of calls, from when all ranks were done with one until they are with the next: bench comm's time."""
    mean: float


def loop(work: Callable[[], object], calls: int) -> Call:
    """As anybody would time a call; ranks' clocks begin at a barrier, and are compared when the loop is over."""
    work()
    dist.barrier()
    started, ends = time.perf_counter(), []
    for _ in range(calls):
        work()
        ends.append(time.perf_counter() - started)
    of_all: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, ends)
    done = [max(those) for those in zip(*of_all, strict=True)]
    return Call(
        statistics.median(after - before for before, after in pairwise([0.0, *done])),
        statistics.mean(those[-1] / calls for those in of_all),
    )


def bare(size: int, calls: int) -> Call:
    """By the backend's own all-reduce, called as it is."""
    tensor = torch.zeros(size // 4)
    return loop(lambda: dist.all_reduce(tensor), calls)


def ours(size: int, calls: int, world: World) -> Call:
    """What `bench comm` has of it."""
    assert dist.group.WORLD is not None
    one = AllReduce(size // 4, torch.float32, world.device, dist.group.WORLD)
    timed = seconds_of(one.run, Asked(("all_reduce",), (size,), None, warm_up=1, calls=calls), world)
    return Call(timed.seconds, timed.mean_s)


def ring(size: int, calls: int) -> Call:
    """By our own ring."""
    tensor = torch.zeros(size // 4)
    return loop(lambda: all_reduce(tensor, "ring"), calls)


def turns(sizes: list[int], count: int, out: str, world: World) -> None:
    """All turns of one number of ranks; the first rank writes them."""
    found: dict[str, dict[str, list[Call]]] = {}
    for size in sizes:
        calls = max(3, min(400, TURN_BYTES // size))
        work: dict[str, Callable[[], Call]] = {
            "bare": partial(bare, size, calls),
            "bench comm": partial(ours, size, calls, world),
        }
        if size == RING_SIZE:
            work["ring"] = partial(ring, size, calls)
        seen: dict[str, list[Call]] = {name: [] for name in work}
        for turn in range(count + 1):
            # Who begins changes; the first turn warms up.
            for name in list(work) if turn % 2 else reversed(list(work)):
                one = work[name]()
                if turn:
                    seen[name].append(one)
        found[str(size)] = seen
    if world.is_first:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def ratio_of(bare_s: Sequence[float], other_s: Sequence[float]) -> tuple[float, float, float]:
    """How much faster the other was by medians; in the middle of where nine of ten lie if turns are drawn again."""
    draw, turns_of = random.Random(0), list(zip(bare_s, other_s, strict=True))

    def ratio(some: list[tuple[float, float]]) -> float:
        return statistics.median(one for one, _ in some) / statistics.median(other for _, other in some)

    again = statistics.quantiles([ratio(draw.choices(turns_of, k=len(turns_of))) for _ in range(500)], n=20)
    return again[0], ratio(turns_of), again[-1]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["64K", "1M", "16M", "64M"])
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    columns = ("ranks", "size", "", "GB/s", "bare GB/s", "ratio", "9 of 10", "by means")
    table = Table(*columns, title="all-reduce on gloo, busbw by the median of calls")
    failed = False
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "turns.json"
            run_ranks(partial(turns, [parse_size(text) for text in args.sizes], args.turns, str(out)), ranks)
            found = json.loads(out.read_text(encoding="utf-8"))
        for size, seen in found.items():
            moved = int(size) * bus_factor("all_reduce", ranks) / 1e9
            for name, least in (("bench comm", 1 - OFF), ("ring", RING)):
                if name not in seen:
                    continue
                other_s, other_means = zip(*seen[name], strict=True)
                bare_s, bare_means = zip(*seen["bare"], strict=True)
                low, middle, high = ratio_of(bare_s, other_s)
                _, by_means, _ = ratio_of(bare_means, other_means)
                speeds = (f"{moved / statistics.median(those):.3f}" for those in (other_s, bare_s))
                ratios = (f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{by_means:.3f}")
                table.add_row(str(ranks), size, name, *speeds, *ratios)
                # The ring is held to its figure where it was promised.
                counts = name == "bench comm" or ranks == 4
                failed |= counts and (middle < least or (name == "bench comm" and middle > 1 + OFF))
    Terminal(width=110).print(table)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
