"""What an all-reduce algorithm sends over which link, and how long that should take. No torch.

Every rank has one link, on which it sends and receives at the same time; ranks of a node share another one to the other
nodes, where that is given. A message takes a latency, and its bytes the slowest link on its way, one message after the
other in each direction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.bandwidth import Line
from meshwright.comm.rounds import Rounds


@dataclass(frozen=True)
class Traffic:
    """Bytes over links, in one direction."""

    of_rank: int
    """Over the busiest link of a rank."""
    of_node: int
    """Over the busiest link between a node and the others; 0 where there is one node."""


def traffic(algorithm: str, ranks: int, count: int, element: int, nodes: Nodes = ()) -> Traffic:
    """What an all-reduce of so many elements of so many bytes sends."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for rank in range(ranks):
        for one in ALGORITHMS[algorithm](rank, ranks, count, nodes):
            for message in one.sends:
                sent[rank, message.to] += message.span.length * element
    return busiest(sent, nodes)


def busiest(sent: Mapping[tuple[int, int], int], nodes: Nodes = ()) -> Traffic:
    """The links that carry most, from what ranks send to each other: bytes by sender and receiver."""
    home = {rank: index for index, node in enumerate(nodes) for rank in node}
    of_ranks: dict[tuple[str, int], int] = defaultdict(int)
    of_nodes: dict[tuple[str, int], int] = defaultdict(int)
    for (origin, to), size in sent.items():
        of_ranks["out", origin] += size
        of_ranks["in", to] += size
        if home.get(origin) != home.get(to):
            of_nodes["out", home[origin]] += size
            of_nodes["in", home[to]] += size
    return Traffic(max(of_ranks.values(), default=0), max(of_nodes.values(), default=0))


@dataclass
class _Links:
    """When the links are free again."""

    inside: Line
    across: Line
    home: Mapping[int, int]
    free: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def send(self, origin: int, to: int, size: int, begin: float) -> tuple[float, float]:
        """When a message has left, and when it is there."""
        far = self.home.get(origin) != self.home.get(to)
        ways = [("out", origin), ("in", to)]
        if far:
            ways += [("leaves", self.home[origin]), ("enters", self.home[to])]
        line = self.across if far else self.inside
        start = max(begin, *(self.free[way] for way in ways))
        left = start + size / line.bandwidth
        for way in ways:
            self.free[way] = left
        return left, left + line.latency_s


def seconds(
    algorithm: str, ranks: int, count: int, element: int, line: Line, nodes: Nodes = (), across: Line | None = None
) -> float:
    """How long an all-reduce should take, with links of this latency and bandwidth; `across` those between nodes."""
    home = {rank: index for index, node in enumerate(nodes) for rank in node}
    links = _Links(line, across or line, home)
    plans: list[Rounds] = [ALGORITHMS[algorithm](rank, ranks, count, nodes) for rank in range(ranks)]
    now = [0.0] * ranks
    at, begun = [0] * ranks, [False] * ranks
    left = [0.0] * ranks
    mail: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    while True:
        waiting = [rank for rank in range(ranks) if at[rank] < len(plans[rank])]
        if not waiting:
            return max(now)
        # Who is earliest begins first, so that links are taken in the order of time.
        fresh = [rank for rank in waiting if not begun[rank]]
        if fresh:
            rank = min(fresh, key=lambda one: now[one])
            begun[rank], left[rank] = True, now[rank]
            for message in plans[rank][at[rank]].sends:
                gone, there = links.send(rank, message.to, message.span.length * element, now[rank])
                left[rank] = max(left[rank], gone)
                mail[rank, message.to].append(there)
        for rank in waiting:
            takes = plans[rank][at[rank]].receives
            if begun[rank] and all(mail[taken.origin, rank] for taken in takes):
                arrived = [mail[taken.origin, rank].popleft() for taken in takes]
                now[rank] = max(now[rank], left[rank], *arrived, 0.0)
                at[rank] += 1
                begun[rank] = False
