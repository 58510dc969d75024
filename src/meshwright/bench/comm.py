"""Collectives timed through the process groups that training uses: on one rank, while all others do the same.

As in nccl-tests a time is that of many calls in a row, the mean over ranks, and groups of one axis are at work all
at once, as they are in a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.bench.collectives import OPERATIONS, Collective
from meshwright.bench.comm_rows import HEADER, UNITS, Row
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
WORLD = "world"
_LONG_S = 2.0
"""Calls of one row take no longer than this, if three of them do not."""
_LEAST = 3


@dataclass(frozen=True)
class Asked:
    """What is measured."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    strategy: str | None
    """Whose axes; None for all ranks together."""
    dtype: str = "float32"
    warm_up: int = 5
    calls: int = 20
    check: bool = True


def measure(asked: Asked, out: str | None, world: World) -> None:
    """Measure, print rows on the first rank as they come, and leave them in a file there."""
    rows: list[Row] = []
    groups = list(_groups(asked, world))
    for operation in asked.operations:
        for axis, group, count in groups:
            _say(world, f"\n{operation} over {axis}: {count} x {group.size()} ranks\n{HEADER}\n{UNITS}")
            for size in asked.sizes:
                row = _row(asked, operation, axis, group, count, size, world)
                rows.append(row)
                _say(world, str(row))
    if world.is_first and out is not None:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def _say(world: World, text: str) -> None:
    if world.is_first:
        print(text, flush=True)


def _groups(asked: Asked, world: World) -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    """The groups that this rank is in, by axis, and how many there are of each."""
    if asked.strategy is None:
        assert dist.group.WORLD is not None
        yield WORLD, dist.group.WORLD, 1
        return
    strategy = Strategy.parse(asked.strategy, world.size)
    mesh = make_mesh(strategy, world.device.type)
    for axis in ("tp", "cp", "pp", "data"):
        of_axis = mesh.data if axis == "data" else mesh[axis]
        if of_axis.size() > 1:
            yield "dp" if axis == "data" else axis, of_axis.get_group(), world.size // of_axis.size()
    if strategy.ep > 1:
        assert mesh.experts is not None
        yield "ep", mesh.experts["ep"].get_group(), world.size // strategy.ep


def _row(
    asked: Asked, operation: str, axis: str, group: dist.ProcessGroup, groups: int, size: int, world: World
) -> Row:
    dtype, kind = DTYPES[asked.dtype], OPERATIONS[operation]
    count = max(1, size // dtype.itemsize)
    if kind.divides:
        count = max(1, count // group.size()) * group.size()
    one = kind(count, dtype, world.device, group)
    wrong = wrong_of(one, asked, world)
    seconds, calls = seconds_of(one.run, asked, world)
    return Row(operation, axis, group.size(), groups, count * dtype.itemsize, count, asked.dtype, seconds, calls, wrong)


def wrong_of(one: Collective, asked: Asked, world: World) -> int | None:
    """Wrong elements on all ranks after one call; None where nobody is to look."""
    return int(world.gather(torch.tensor([one.wrong()])).sum()) if asked.check else None


def seconds_of(work: Callable[[], object], asked: Asked, world: World) -> tuple[float, int]:
    """Of a call, the mean over all ranks; and how many calls that was."""
    warm = _timed(work, max(1, asked.warm_up), world)
    calls = max(_LEAST, min(asked.calls, int(_LONG_S / max(warm, 1e-9))))
    # All must do as many.
    calls = int(world.gather(torch.tensor([calls])).min())
    return _timed(work, calls, world), calls


def _timed(work: Callable[[], object], calls: int, world: World) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    spent = (time.perf_counter() - started) / calls
    return float(world.sum(torch.tensor(spent, dtype=torch.float64))) / world.size
