"""All-reduce algorithms beside the backend's own: time, bytes through the busiest links, and what both should be.

The busiest link is that of the rank which sends or receives most; where ranks are on several machines, also that of the
machine which does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.bench.collectives import AllReduce, SendReceive
from meshwright.bench.comm import DTYPES, Asked, leave, seconds_of, wrong_of
from meshwright.comm import predict
from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.all_reduce import all_reduce, machines_of
from meshwright.comm.bandwidth import Line
from meshwright.comm.fitted_line import fit
from meshwright.comm.transfers import exchange
from meshwright.comm.travel import BACKEND
from meshwright.parallel.world import World


class ByAlgorithm(AllReduce):
    """An all-reduce by the backend, or by one of the algorithms."""

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, name: str, nodes: Nodes
    ) -> None:
        super().__init__(count, dtype, device, group)
        self.name, self.nodes = name, nodes
        self.sent: dict[int, int] = {}
        """Bytes that this rank has sent in the last call, by receiver; nothing of the backend, which does not tell."""

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
    link: int | None
    """Bytes through the busiest link of a rank; None of the backend, which does not tell."""
    expected_link: int | None
    node_link: int | None
    """Bytes through the busiest link of a machine; None also where there is only one."""
    expected_node_link: int | None
    wrong: int | None
    """Elements on all ranks that were wrong; None where nobody looked."""
    ratio: float
    """The backend's time over this one's."""

    def __str__(self) -> str:
        expected = "" if self.expected_s is None else f"{self.expected_s * 1e6:.1f}"
        links = (self.link, self.expected_link, self.node_link, self.expected_node_link)
        told = "".join(f"{'' if one is None else one:>12}" for one in links)
        return (
            f"{self.bytes:12d}  {self.algorithm:18}{self.seconds * 1e6:12.1f}{expected:>12}{self.ratio:11.2f}x"
            f"{'N/A' if self.wrong is None else self.wrong:>8}{told}"
        ).rstrip()


def header(nodes: Nodes) -> str:
    """What the columns are."""
    told = f"{'link (B)':>12}{'expected':>12}" + (f"{'node (B)':>12}{'expected':>12}" if len(nodes) > 1 else "")
    columns = f"{'time (us)':>12}{'expected':>12}{'of backend':>12}{'#wrong':>8}{told}"
    return f"{'size (B)':>12}  {'algorithm':18}{columns}"


def measure(asked: Asked, node_size: int | None, out: str | None, world: World) -> None:
    """Measure all algorithms at all sizes over all ranks; the first rank prints, and leaves rows in a file."""
    nodes = nodes_of(world, node_size)
    inside, across = message_lines(asked, nodes, world)
    rows: list[AlgorithmRow] = []
    if world.is_first:
        print(f"a message to the next rank, all at once: {_words(inside)}")
        if across is not None:
            print(f"a message to the next machine, one of each: {_words(across)}")
        print(header(nodes), flush=True)
    for size in asked.sizes:
        rows += _rows(asked, size, nodes, (inside, across), world)
    leave(rows, out, world)


def _words(line: Line) -> str:
    return f"{line.latency_s * 1e6:.1f} us and {line.bandwidth / 1e9:.3g} GB/s"


def nodes_of(world: World, node_size: int | None) -> Nodes:
    """Ranks by machine; or so many neighbours each, as if they were machines."""
    if node_size is not None:
        return [range(first, min(first + node_size, world.size)) for first in range(0, world.size, node_size)]
    assert dist.group.WORLD is not None
    return machines_of(dist.group.WORLD)


class Around(SendReceive):
    """Messages around rings of some ranks, all rings at once; who is in none is idle."""

    def __init__(self, count: int, dtype: torch.dtype, world: World, rings: Nodes) -> None:
        assert dist.group.WORLD is not None
        super().__init__(count, dtype, world.device, dist.group.WORLD)
        self.ring = next((list(one) for one in rings if world.rank in one and len(one) > 1), [])

    def run(self) -> None:
        if self.ring:
            place, ranks = self.ring.index(self.rank), len(self.ring)
            after, before = self.ring[(place + 1) % ranks], self.ring[(place - 1) % ranks]
            exchange(self.given, after, self.made, before, self.group).wait()


def message_lines(asked: Asked, nodes: Nodes, world: World) -> tuple[Line, Line | None]:
    """Latency and bandwidth of messages inside of machines, and between them where there are several."""
    everyone: Nodes = [range(world.size)]
    if len(nodes) == 1:
        return _line(asked, everyone, world), None
    across = _line(asked, [[node[0] for node in nodes]], world)
    return (_line(asked, nodes, world) if max(map(len, nodes)) > 1 else across), across


def _line(asked: Asked, rings: Nodes, world: World) -> Line:
    dtype = DTYPES[asked.dtype]
    members = sum(len(one) for one in rings if len(one) > 1)
    points = []
    for size in sorted({*asked.sizes, 8, 1 << 20}):
        one = Around(max(1, size // dtype.itemsize), dtype, world, rings)
        # The mean over all ranks, of whom some do nothing.
        seconds = seconds_of(one.run, asked, world).mean_s * world.size / members
        points.append((one.given.nbytes, seconds))
    found = fit(points)
    assert found is not None
    return found


def _rows(
    asked: Asked, size: int, nodes: Nodes, lines: tuple[Line, Line | None], world: World
) -> Iterator[AlgorithmRow]:
    assert dist.group.WORLD is not None
    dtype = DTYPES[asked.dtype]
    count = max(1, size // dtype.itemsize)
    reference = 0.0
    for name in (BACKEND, *ALGORITHMS):
        one = ByAlgorithm(count, dtype, world.device, dist.group.WORLD, name, nodes)
        wrong = wrong_of(one, asked, world)
        seconds = seconds_of(one.run, asked, world).mean_s
        reference = seconds if name == BACKEND else reference
        expected = seen = planned = None
        if name != BACKEND:
            expected = predict.seconds(name, world.size, count, dtype.itemsize, lines[0], nodes, lines[1])
            planned = predict.traffic(name, world.size, count, dtype.itemsize, nodes)
            seen = _traffic(one.sent, nodes, world)
        several = len(nodes) > 1
        row = AlgorithmRow(
            name,
            one.made.nbytes,
            seconds,
            expected,
            seen.of_rank if seen is not None else None,
            planned.of_rank if planned is not None else None,
            seen.of_node if seen is not None and several else None,
            planned.of_node if planned is not None and several else None,
            wrong,
            reference / seconds,
        )
        if world.is_first:
            print(row, flush=True)
        yield row


def _traffic(sent: Mapping[int, int], nodes: Nodes, world: World) -> predict.Traffic:
    """The busiest links, from what every rank says that it has sent."""
    table = world.gather(torch.tensor([sent.get(rank, 0) for rank in range(world.size)])).tolist()
    return predict.busiest(
        {(rank, to): size for rank, row in enumerate(table) for to, size in enumerate(row) if size}, nodes
    )
