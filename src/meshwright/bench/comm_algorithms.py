"""All-reduce algorithms beside the backend's own: time, bytes of the busiest rank, and what both should be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.bench.collectives import AllReduce, SendReceive
from meshwright.bench.comm import DTYPES, Asked, seconds_of, wrong_of
from meshwright.comm import predict
from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.all_reduce import all_reduce, machines_of
from meshwright.comm.bandwidth import Line, fit
from meshwright.comm.travel import BACKEND
from meshwright.parallel.world import World

HEADER = (
    f"{'size (B)':>12}  {'algorithm':18}{'time (us)':>12}{'expected':>12}{'of backend':>12}"
    f"{'sent (B)':>14}{'expected':>14}{'#wrong':>8}"
)


class ByAlgorithm(AllReduce):
    """An all-reduce by the backend, or by one of the algorithms."""

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, name: str, nodes: Nodes
    ) -> None:
        super().__init__(count, dtype, device, group)
        self.name, self.nodes = name, nodes
        self.sent = 0
        """Bytes that this rank has sent in the last call."""

    def run(self) -> None:
        if self.name == BACKEND:
            super().run()
        else:
            self.sent = all_reduce(self.made, self.name, self.group, self.nodes)


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
    wrong: int | None
    """Elements on all ranks that were wrong; None where nobody looked."""
    ratio: float
    """The backend's time over this one's."""

    def __str__(self) -> str:
        expected = "" if self.expected_s is None else f"{self.expected_s * 1e6:.1f}"
        sent, planned = ("" if one is None else str(one) for one in (self.sent, self.expected_sent))
        return (
            f"{self.bytes:12d}  {self.algorithm:18}{self.seconds * 1e6:12.1f}{expected:>12}{self.ratio:11.2f}x"
            f"{sent:>14}{planned:>14}{'N/A' if self.wrong is None else self.wrong:>8}"
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
    assert dist.group.WORLD is not None
    return machines_of(dist.group.WORLD)


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
    assert dist.group.WORLD is not None
    dtype = DTYPES[asked.dtype]
    count = max(1, size // dtype.itemsize)
    rows: list[AlgorithmRow] = []
    reference = 0.0
    for name in (BACKEND, *ALGORITHMS):
        one = ByAlgorithm(count, dtype, world.device, dist.group.WORLD, name, nodes)
        wrong = wrong_of(one, asked, world)
        seconds, _ = seconds_of(one.run, asked, world)
        reference = seconds if name == BACKEND else reference
        expected = sent = planned = None
        if name != BACKEND:
            expected = predict.seconds(name, world.size, count, dtype.itemsize, line, nodes)
            planned = predict.traffic(name, world.size, count, dtype.itemsize, nodes).sent
            sent = int(world.gather(torch.tensor([one.sent])).max())
        rows.append(AlgorithmRow(name, one.made.nbytes, seconds, expected, sent, planned, wrong, reference / seconds))
        if world.is_first:
            print(rows[-1], flush=True)
    return rows
