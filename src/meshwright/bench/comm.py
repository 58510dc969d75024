"""Collectives timed through the process groups that training uses: on one rank, while all others do the same.

As in nccl-tests calls come in a row, and groups of one axis are at work all at once, as they are in a step. On CPU
cores a time is the median of the calls and not their mean: over a slow link a call now and then takes several times as
long as the others, when a packet is lost or two ranks that exchange something take turns, so that no mean is met again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.bench.collectives import OPERATIONS, Collective
from meshwright.bench.comm_rows import HEADER, UNITS, Row
from meshwright.cluster.cluster import chip_named
from meshwright.comm.all_reduce import machines_of
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
WORLD = "world"
_LONG_S = 2.0
"""Calls of one row take no longer than this, unless three of them do; fewer are made where fewer are asked for."""
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


@dataclass(frozen=True)
class Place:
    """The groups of an axis, seen from a rank that is in one of them."""

    axis: str
    group: dist.ProcessGroup
    groups: int
    inside: int
    """Ranks of a group that share a machine: of all groups the fewest."""
    node: int
    """Ranks of a machine, the most."""

    def __str__(self) -> str:
        spread = "" if self.inside == self.group.size() else f", {self.inside} of a group in a machine"
        return f"{self.axis}: {self.groups} x {self.group.size()} ranks{spread}"


class Timed(NamedTuple):
    """Seconds of a call, the mean over groups that are at work at once."""

    seconds: float
    """The median of the calls; on a GPU, whose clock is read once, their mean."""
    mean_s: float
    calls: int
    quick_s: float | None = None
    """A quarter of the calls took no longer; None on a GPU."""
    slow_s: float | None = None
    """A quarter of the calls took as long or longer."""


def measure(asked: Asked, out: str | None, world: World) -> None:
    """Measure, print rows on the first rank as they come, and leave them in a file there."""
    rows: list[Row] = []
    places = list(places_of(asked, world))
    for operation in asked.operations:
        for place in places:
            _say(world, f"\n{operation} over {place}, {world.backend} on {world.device.type}\n{HEADER}\n{UNITS}")
            for size in asked.sizes:
                row = _row(asked, operation, place, size, world)
                rows.append(row)
                _say(world, str(row))
    leave(rows, out, world)


def leave(rows: Sequence[Any], out: str | None, world: World) -> None:
    """Write what was measured, and on what, where the first rank was asked to."""
    if world.is_first and out is not None:
        found = {**facts_of(world), "rows": [asdict(row) for row in rows]}
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def facts_of(world: World) -> dict[str, Any]:
    """On what is measured."""
    chip, name = "cpu", "cpu"
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        known = chip_named(name, torch.cuda.get_device_properties(world.device).total_memory / 2**20)
        chip = known.key if known is not None else ""
    return {"backend": world.backend, "ranks": world.size, "chip": chip, "device": name, "torch": torch.__version__}


def _say(world: World, text: str) -> None:
    if world.is_first:
        print(text, flush=True)


def places_of(asked: Asked, world: World) -> Iterator[Place]:
    """The axes that are measured, whose groups all ranks make together."""
    assert dist.group.WORLD is not None
    node = max(map(len, machines_of(dist.group.WORLD)))
    for axis, group, count in _groups(asked, world):
        inside = max(map(len, machines_of(group)))
        yield Place(axis, group, count, int(world.gather(torch.tensor([inside])).min()), node)


def _groups(asked: Asked, world: World) -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    """The groups that this rank is in, by axis, and how many there are of each; those of the same ranks once."""
    if asked.strategy is None:
        assert dist.group.WORLD is not None
        yield WORLD, dist.group.WORLD, 1
        return
    strategy = Strategy.parse(asked.strategy, world.size)
    mesh = make_mesh(strategy, world.device.type)
    meshes = {axis: mesh[axis] for axis in ("tp", "cp", "pp")}
    meshes |= {"dp": mesh.data, "replicate": mesh["replicate"], "shard": mesh["shard"]}
    meshes |= {"loss": mesh.loss, "state": mesh.state}
    if mesh.experts is not None:
        meshes |= {"ep": mesh.experts["ep"], "copies": mesh.experts.copies, "expert_state": mesh.experts.state}
    seen = set()
    for axis, one in meshes.items():
        # Axes that are the same ranks on one rank are so on all.
        ranks = tuple(dist.get_process_group_ranks(one.get_group()))
        if len(ranks) > 1 and ranks not in seen:
            seen.add(ranks)
            yield axis, one.get_group(), world.size // len(ranks)


def _row(asked: Asked, operation: str, place: Place, size: int, world: World) -> Row:
    dtype, kind, group = DTYPES[asked.dtype], OPERATIONS[operation], place.group
    count = max(1, size // dtype.itemsize)
    if kind.divides:
        count = max(1, count // group.size()) * group.size()
    one = kind(count, dtype, world.device, group)
    wrong = wrong_of(one, asked, world)
    timed = seconds_of(one.run, asked, world, group)
    return Row(
        operation, place.axis, group.size(), place.groups, count * dtype.itemsize, count, asked.dtype, timed.seconds,
        timed.calls, wrong, place.inside, place.node, timed.mean_s, timed.quick_s, timed.slow_s,
    )  # fmt: skip


def wrong_of(one: Collective, asked: Asked, world: World) -> int | None:
    """Wrong elements on all ranks after one call; None where nobody is to look."""
    return int(world.gather(torch.tensor([one.wrong()])).sum()) if asked.check else None


def seconds_of(work: Callable[[], object], asked: Asked, world: World, group: dist.ProcessGroup | None = None) -> Timed:
    """What a call of work that the ranks of a group, else all of them, do together takes."""
    calls = asked.calls
    if asked.warm_up:
        warm = _timed(work, asked.warm_up, world, group).mean_s
        calls = min(calls, max(_LEAST, int(_LONG_S / max(warm, 1e-9))))
    # All must do as many.
    calls = int(world.gather(torch.tensor([calls])).min())
    return _timed(work, calls, world, group)


def _timed(work: Callable[[], object], calls: int, world: World, group: dist.ProcessGroup | None) -> Timed:
    ends: list[float] = []
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        work()
        ends.append(time.perf_counter() - started)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    spent = torch.tensor((time.perf_counter() - started) / calls, dtype=torch.float64)
    mean = float(world.sum(spent)) / world.size
    if world.device.type == "cuda":
        # Calls are only given to a device: when each is done, it does not tell.
        return Timed(mean, mean, calls)
    quick, middle, slow = (world.sum(_quartiles(torch.tensor(ends, dtype=torch.float64), group)) / world.size).tolist()
    return Timed(middle, mean, calls, quick, slow)


def _quartiles(ends: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Of the times from one call to the next, by when each is done on all ranks of the group.

    Not of a rank's own: one that only sends is done with several calls at once, and waits in the next.
    """
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return ends.diff(prepend=ends.new_zeros(1)).quantile(ends.new_tensor([0.25, 0.5, 0.75]))
