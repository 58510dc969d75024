"""Which node stands in which place, where nodes differ in their links: the order that a step waits least for. No torch.

Up to seven nodes all orders are tried. Beyond, nodes are put beside those that they are joined to best: in a row, and
along the groups of each axis and of the busiest ones together. The best of these starts are changed by swaps of two
nodes. What a step waits for is the busiest link, and many orders tie in it: among them one counts as better in which
nodes that share an axis are joined better, all with all, though they may talk in a ring; then one whose links carry
less. A search that stands on such a plateau goes on over orders that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from math import factorial

from meshwright.cluster.fabric import Fabric
from meshwright.planning.link_loads import LinkLoad

EXACT = 5040
"""Orders that are all tried: those of up to seven nodes."""
EDGES = 600_000
"""Loads between two nodes that are looked at in all: about a second of it."""
PATIENCE = 24
"""Swaps in a row that need not help."""
STARTS = 2
"""From how many orders swaps begin."""

Nodes = tuple[int, ...]
Key = tuple[float, float, float]
"""What a step waits for; how far apart those are that share an axis; squares of the times of links. Lower is better."""


@dataclass
class Effort:
    """What a search may still look at."""

    edges: float = EDGES
    orders: int = EXACT
    """Up to how many orders of nodes are all tried."""

    def spend(self, edges: int) -> bool:
        """Whether there was as much left."""
        self.edges -= edges
        return self.edges >= 0


class _Search:
    """Orders of nodes for the loads of an order of axes."""

    def __init__(
        self, loads: Sequence[LinkLoad], fabric: Fabric, waited: Callable[[Sequence[float]], float], effort: Effort
    ) -> None:
        self.loads, self.fabric, self._waited, self._effort = loads, fabric, waited, effort
        self._pairs = [(one, other, size) for load in loads for one, other, size in _pairs(load, len(fabric.counts))]
        self._edges = sum(len(load.between) for load in loads) + len(self._pairs) + 1
        self._slowness = [[1 / fabric.joined(one, other) for other in fabric.nodes] for one in fabric.nodes]
        self._known: dict[Nodes, Key] = {}

    def key(self, nodes: Nodes) -> Key | None:
        """How good an order is; None where the effort is spent."""
        if nodes not in self._known:
            if not self._effort.spend(self._edges):
                return None
            self._known[nodes] = self.rate(nodes)
        return self._known[nodes]

    def rate(self, nodes: Nodes) -> Key:
        """How good an order is."""
        longest, squares = [], 0.0
        for load in self.loads:
            times = load.path_seconds(self.fabric, nodes)
            own = load.inside / self.fabric.link, load.card / self.fabric.nic
            longest.append(max(*own, *times, 0.0))
            squares += sum(one * one for one in times)
        # Sums in another order differ in their last bits, and must not count as better.
        apart = sum(size * self._slowness[nodes[one]][nodes[other]] for one, other, size in self._pairs)
        return _rounded(self._waited(longest)), _rounded(apart), _rounded(squares)

    def improved(self, start: Nodes, enough: float) -> Nodes:
        """Swaps of two nodes, one of them on a busiest link, as long as they lead somewhere."""
        best = now = start
        best_key = self.rate(start)
        seen, waited = {self._kinds(start)}, 0
        while best_key[0] > enough and waited < PATIENCE:
            found: tuple[Key, Nodes] | None = None
            for nodes in self._neighbours(now):
                if self._kinds(nodes) in seen:
                    continue
                key = self.key(nodes)
                if key is None:
                    return min((best_key, best), found or (best_key, best))[1]
                if found is None or key < found[0]:
                    found = key, nodes
            if found is None:
                break
            key, now = found
            seen.add(self._kinds(now))
            waited += 1
            if key < best_key:
                waited = 0 if key[0] < best_key[0] else waited
                best_key, best = key, now
        return best

    def _kinds(self, nodes: Nodes) -> Nodes:
        """What orders have in common that differ by nodes which are alike."""
        return tuple(self.fabric.kinds[node] for node in nodes)

    def _neighbours(self, nodes: Nodes) -> Iterator[Nodes]:
        for first in self._busiest(nodes):
            for second in range(len(nodes)):
                if self.fabric.kinds[nodes[second]] != self.fabric.kinds[nodes[first]]:
                    swapped = list(nodes)
                    swapped[first], swapped[second] = swapped[second], swapped[first]
                    yield tuple(swapped)

    def _busiest(self, nodes: Nodes) -> list[int]:
        """Places whose nodes are at the ends of what an axis waits for, of each axis, without repeats."""
        found: dict[int, None] = {}
        for load in self.loads:
            edges = [
                (size / self.fabric.joined(nodes[source], nodes[target]), source, target)
                for (source, target), size in load.between.items()
            ]
            longest = max((seconds for seconds, _, _ in edges), default=0.0)
            for seconds, source, target in edges:
                if seconds > 0 and seconds >= longest * (1 - 1e-9):
                    found |= {source: None, target: None}
        return list(found)


def best_nodes(
    loads: Sequence[LinkLoad],
    fabric: Fabric,
    given: Nodes,
    waited: Callable[[Sequence[float]], float],
    enough: float,
    effort: Effort,
) -> Nodes:
    """The best order of nodes that is found; nothing below `enough` seconds is looked for."""
    search = _Search(loads, fabric, waited, effort)
    if factorial(len(given)) <= effort.orders:
        return min(permutations(given), key=search.rate)
    ranked = sorted(dict.fromkeys(starts(loads, fabric, given)), key=search.rate)
    return min((search.improved(start, enough) for start in ranked[:STARTS]), key=search.rate)


def starts(loads: Sequence[LinkLoad], fabric: Fabric, given: Nodes) -> Iterator[Nodes]:
    """Nodes as they are given, those that are joined well in a row, and the same along the groups of axes."""
    yield given
    row = _in_a_row(fabric, given)
    yield row
    busy = sorted(loads, key=lambda load: max(load.between.values(), default=0.0), reverse=True)
    for together in (*([load] for load in loads), *(busy[:count] for count in range(2, len(busy) + 1))):
        nodes = [0] * len(given)
        for place, node in zip(chain(*_groups(together, len(given))), row, strict=True):
            nodes[place] = node
        yield tuple(nodes)


def _in_a_row(fabric: Fabric, nodes: Nodes) -> Nodes:
    """Each beside the free one that it is joined to best."""
    left = list(nodes)
    found = [left.pop(0)]
    while left:
        last = found[-1]
        found.append(max(left, key=lambda node: (fabric.joined(last, node), -node)))
        left.remove(found[-1])
    return tuple(found)


def _pairs(load: LinkLoad, count: int) -> Iterator[tuple[int, int, float]]:
    """Any two places that an axis joins, by itself or by way of others, and what it carries."""
    most = max(load.between.values(), default=0.0)
    for group in _groups([load], count):
        yield from ((one, other, most) for one, other in combinations(group, 2))


def _groups(loads: Sequence[LinkLoad], count: int) -> list[list[int]]:
    """All places, those together that axes join."""
    beside: dict[int, list[int]] = {place: [] for place in range(count)}
    for source, target in (edge for load in loads for edge in load.between):
        beside[source].append(target)
        beside[target].append(source)
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in range(count):
        waiting, group = [first], []
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                group.append(place)
                waiting += sorted(set(beside[place]), reverse=True)
        found += [group] if group else []
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.9e}")
