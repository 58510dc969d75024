"""All-reduce algorithms beside the backend's own: time, bytes of the busiest rank, and what both should be."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.bench.collectives import PERIOD, SendReceive
from meshwright.bench.comm import DTYPES, Asked, seconds_of
from meshwright.comm import predict
from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.all_reduce import Sent, all_reduce
from meshwright.comm.bandwidth import Line, fit
from meshwright.parallel.world import World

BACKEND = "backend"
HEADER = (
    f"{'size (B)':>12}  {'algorithm':18}{'time (us)':>12}{'expected':>12}{'of backend':>12}"
    f"{'sent (B)':>14}{'expected':>14}{'#wrong':>8}"
)


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm at one size."""

    algorithm: str
    bytes: int
    seconds: float
    expected_s: float | None
    sent: int | None
    """By the rank that sends most; None of the backend, which does not tell."""
    expected_sent: int | None
    wrong: int
    ratio: float
    """The backend's time over this one's."""

    def __str__(self) -> str:
        expected = "" if self.expected_s is None else f"{self.expected_s * 1e6:.1f}"
        sent, planned = ("" if one is None else str(one) for one in (self.sent, self.expected_sent))
        return (
            f"{self.bytes:12d}  {self.algorithm:18}{self.seconds * 1e6:12.1f}{expected:>12}{self.ratio:11.2f}x"
            f"{sent:>14}{planned:>14}{self.wrong:8d}"
        )


def measure(asked: Asked, node_size: int | None, out: str | None, world: World) -> None:
    """Measure all algorithms at all sizes over all ranks; the first rank prints, and leaves rows in a file."""
    assert dist.group.WORLD is not None
    nodes = nodes_of(world, node_size)
    line = _link(asked, world)
    rows: list[AlgorithmRow] = []
    if world.is_first:
        told = f"{line.latency_s * 1e6:.1f} us and {line.bandwidth / 1e9:.2f} GB/s"
        print(f"a message to the next rank, all at once: {told}\n{HEADER}", flush=True)
    for size in asked.sizes:
        rows += _rows(asked, size, nodes, line, world)
    if world.is_first and out is not None:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def nodes_of(world: World, node_size: int | None) -> Nodes:
    """Ranks by machine; or so many neighbours each, as if they were machines."""
    if node_size is not None:
        return [range(first, min(first + node_size, world.size)) for first in range(0, world.size, node_size)]
    hosts = world.exchange(socket.gethostname())
    return [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]


def _link(asked: Asked, world: World) -> Line:
    """Latency and bandwidth of messages, while all ranks send and receive one."""
    assert dist.group.WORLD is not None
    dtype = DTYPES[asked.dtype]
    points = []
    for size in sorted({*asked.sizes, 8, 1 << 20}):
        one = SendReceive(max(1, size // dtype.itemsize), dtype, world.device, dist.group.WORLD)
        points.append((one.given.nbytes, seconds_of(one.run, asked, world)[0]))
    found = fit(points)
    assert found is not None
    return found


def _rows(asked: Asked, size: int, nodes: Nodes, line: Line, world: World) -> list[AlgorithmRow]:
    dtype = DTYPES[asked.dtype]
    count = max(1, size // dtype.itemsize)
    rows: list[AlgorithmRow] = []
    reference = 0.0
    for name in (BACKEND, *ALGORITHMS):
        tensor = torch.zeros(count, dtype=dtype, device=world.device)
        work: Callable[[], Sent | None] = (
            partial(_backend, tensor) if name == BACKEND else partial(all_reduce, tensor, name, nodes=nodes)
        )
        wrong, sent = _checked(work, tensor, world)
        seconds, _ = seconds_of(work, asked, world)
        reference = seconds if name == BACKEND else reference
        expected = None if name == BACKEND else predict.seconds(name, world.size, count, dtype.itemsize, line, nodes)
        planned = None if name == BACKEND else predict.traffic(name, world.size, count, dtype.itemsize, nodes).sent
        told = None if name == BACKEND else sent
        rows.append(AlgorithmRow(name, tensor.nbytes, seconds, expected, told, planned, wrong, reference / seconds))
        if world.is_first:
            print(rows[-1], flush=True)
    return rows


def _backend(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _checked(work: Callable[[], Sent | None], tensor: Tensor, world: World) -> tuple[int, int]:
    """Wrong elements over all ranks after one call, and bytes of the rank that sent most."""
    places = torch.arange(tensor.numel(), device=tensor.device)
    tensor.copy_((places + world.rank) % PERIOD % 2)
    sent = work()
    expected = sum(((places + rank) % PERIOD % 2).to(tensor.dtype) for rank in range(world.size))
    wrong = int((tensor != expected).sum())
    # Sums of sums would grow without end.
    tensor.zero_()
    both = world.gather(torch.tensor([wrong, sent.bytes if sent is not None else 0]))
    return int(both[:, 0].sum()), int(both[:, 1].max())
