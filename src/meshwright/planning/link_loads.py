"""What the traffic of a strategy's axes puts on each link, where ranks lie in some order over nodes. No torch.

All groups of an axis are at work at the same time, rings in the order of the group. What leaves a node for a group goes
through the network cards of all its members there, as NCCL lets it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from meshwright.axis_order import AXES, Order, strides
from meshwright.cluster.fabric import Fabric
from meshwright.estimate.units import Place
from meshwright.planning.axis_traffic import CHAIN, EXCHANGE, AxisTraffic
from meshwright.strategy import Strategy

SAMPLED = 4
"""Nodes beyond which three of them speak for all, where all are alike."""


@dataclass(frozen=True)
class LinkLoad:
    """Bytes of an axis in one step over links, in one direction."""

    traffic: AxisTraffic
    inside: float
    """Over the busiest link of a chip to others of its node."""
    card: float
    """Through the busiest network card of a chip."""
    uplink: float
    """Out of the busiest node."""
    between: Mapping[tuple[int, int], float]
    """From node to node."""

    def times(self, traffic: AxisTraffic) -> LinkLoad:
        """The same of other traffic over the axis, where this is of one byte by each rank."""
        size = traffic.size
        between = {edge: share * size for edge, share in self.between.items()}
        return LinkLoad(traffic, self.inside * size, self.card * size, self.uplink * size, between)

    def seconds(self, fabric: Fabric, nodes: Sequence[int]) -> float:
        """Of the busiest link; `nodes` says which node of the fabric stands in each place."""
        return max(self.inside / fabric.link, self.card / fabric.nic, *self.path_seconds(fabric, nodes), 0.0)

    def path_seconds(self, fabric: Fabric, nodes: Sequence[int]) -> list[float]:
        """Of each path between nodes that carries something, in each direction."""
        loads: dict[tuple[int, bool], float] = defaultdict(float)
        routes = fabric.routes
        for (source, target), size in self.between.items() if fabric.paths else ():
            for way in routes.get((nodes[source], nodes[target]), ()):
                loads[way] += size
        return [size / fabric.paths[number][2] for (number, _), size in loads.items()]


def link_loads(
    strategy: Strategy, order: Order, traffic: Sequence[AxisTraffic], fabric: Fabric
) -> tuple[LinkLoad, ...]:
    """The loads of all axes."""
    degrees, counts, alike = degrees_of(strategy), fabric.counts, fabric.is_uniform
    return tuple(_of_a_byte(degrees, order, one.axis, one.kind, counts, alike).times(one) for one in traffic)


def degrees_of(strategy: Strategy) -> Strategy:
    """What of a strategy says who talks to whom."""
    axes = {axis: getattr(strategy, axis) for axis in (*AXES, "ep")}
    return Strategy(**axes, zero=min(strategy.zero, 1))


@lru_cache(maxsize=8192)
def _of_a_byte(
    strategy: Strategy, order: Order, axis: str, kind: str, counts: tuple[int, ...], alike: bool
) -> LinkLoad:
    """The load where every rank sends one byte over an axis: a search asks for the same ones again and again."""
    return _grid(strategy, order, counts, alike).load(AxisTraffic(axis, kind, 1.0))


@lru_cache(maxsize=16)
def _grid(strategy: Strategy, order: Order, counts: tuple[int, ...], alike: bool) -> _Grid:
    return _Grid(strategy, order, counts, alike)


class _Grid:
    """The ranks of a strategy in nodes."""

    def __init__(self, strategy: Strategy, order: Order, counts: Sequence[int], alike: bool) -> None:
        self._strategy, self._counts = strategy, counts
        self._starts = [0, *accumulate(counts)][:-1]
        world = strategy.world
        self._stride = strides(order, strategy)
        nodes = [node for node, start in enumerate(self._starts) if start < world]
        if len(nodes) > SAMPLED and alike:
            # Pipeline ranks in the middle have others before and after them.
            nodes = sorted({nodes[0], self.home(strategy.pp // 2 * self._stride["pp"]), nodes[-1]})
        self._ranks = [
            rank
            for node in nodes
            for rank in range(self._starts[node], min(world, self._starts[node] + self._counts[node]))
        ]
        self._places = {rank: Place.of(strategy, rank, order) for rank in self._ranks}
        self._groups: dict[tuple[str, int, int, tuple[int, int]], list[int]] = {}

    def home(self, rank: int) -> int:
        return bisect_right(self._starts, rank) - 1

    def load(self, traffic: AxisTraffic) -> LinkLoad:
        inside, cards, uplinks = (defaultdict[int, float](float) for _ in range(3))
        between, shared = (defaultdict[tuple[int, int], float](float) for _ in range(2))
        members: dict[tuple[int, int], list[int]] = {}
        for rank in self._ranks:
            own, group, place = self.home(rank), *self.group(rank, traffic.axis)
            members.setdefault((own, group[0]), []).append(rank)
            for peer, size in _sends(traffic, group, place):
                home = self.home(peer)
                if home == own:
                    inside[rank] += size
                    continue
                uplinks[own] += size
                between[own, home] += size
                shared[own, group[0]] += size
        for key, size in shared.items():
            for rank in members[key]:
                cards[rank] += size / len(members[key])
        busiest = [max(one.values(), default=0.0) for one in (inside, cards, uplinks)]
        return LinkLoad(traffic, busiest[0], busiest[1], busiest[2], dict(between))

    def group(self, rank: int, axis: str) -> tuple[Sequence[int], int]:
        """The ranks that a rank shares an axis with, in order, and its place among them."""
        place, strategy = self._places[rank], self._strategy
        if axis in AXES:
            first = rank - getattr(place, axis) * self._stride[axis]
            last = first + getattr(strategy, axis) * self._stride[axis]
            return range(first, last, self._stride[axis]), getattr(place, axis)
        base = rank - sum(getattr(place, one) * self._stride[one] for one in ("replicate", "shard", "cp"))
        mine = place.replicate * strategy.shard + place.shard
        context = place.cp if axis == "ep" else 0
        key = axis, base, context, self._part(axis, mine)
        if key not in self._groups:
            self._groups[key] = sorted(self._members(*key))
        found = self._groups[key]
        return found, bisect_left(found, rank)

    def _part(self, axis: str, data: int) -> tuple[int, int]:
        """What data ranks have in common whose ranks share an axis."""
        strategy = self._strategy
        match axis:
            case "ep":
                return data // strategy.ep, 0
            case "copies":
                return data % strategy.ep, 0
            case "expert_state":
                return data % strategy.ep, data // (strategy.expert_copies[1] * strategy.ep)
            case "state":
                return data // strategy.shard, 0
            case _:
                return 0, 0

    def _members(self, axis: str, base: int, context: int, part: tuple[int, int]) -> Iterator[int]:
        """Ranks of an axis that is made of others."""
        strategy, stride = self._strategy, self._stride
        contexts = [context] if axis == "ep" else range(strategy.cp)
        for data in range(strategy.dp):
            if self._part(axis, data) == part:
                replicate, shard = divmod(data, strategy.shard)
                first = base + replicate * stride["replicate"] + shard * stride["shard"]
                yield from (first + one * stride["cp"] for one in contexts)


def _sends(traffic: AxisTraffic, group: Sequence[int], place: int) -> Iterator[tuple[int, float]]:
    """Whom a rank sends to, and how much."""
    size, count = traffic.size, len(group)
    if count == 1:
        return
    if traffic.kind == EXCHANGE:
        yield from ((peer, size / (count - 1)) for index, peer in enumerate(group) if index != place)
    elif traffic.kind == CHAIN:
        if place + 1 < count:
            yield group[place + 1], size
        if place > 0:
            yield group[place - 1], size
    else:
        yield group[(place + 1) % count], size
