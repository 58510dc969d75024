"""What a search of strategies counts for the paths between machines: over orders that are found once. No torch.

Which orders of axes and machines are good follows from who talks to whom, more than from how much. They are looked for
once for all strategies of the same degrees, and a strategy waits what the best of them costs with its own traffic. The
strategies that are shown are placed again, by `placement`, with all that it can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from math import factorial

from meshwright.axis_order import AXES, orders
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.fabric import Fabric, fabric_of
from meshwright.planning.axis_traffic import AxisTraffic, axis_traffic, least_traffic
from meshwright.planning.link_loads import LinkLoad, degrees_of, link_loads
from meshwright.planning.node_order import EDGES, Effort, Nodes, best_nodes, starts
from meshwright.planning.placement import NOTHING_HIDES, WORTH, Hiding, for_paths, hiding_of, linked
from meshwright.planning.question import Candidate
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants
from meshwright.strategy import Strategy

QUICK = 120
"""Orders of machines that are all looked at: those of up to five."""
QUICK_EDGES = EDGES / 50
"""What is looked at to find good ones of more machines."""
MANY = 16
"""Of more machines only the usual order of axes is looked at."""
AGAIN = 2
"""How much more of an axis layers send at most that are computed again."""


@dataclass(frozen=True)
class _Way:
    """An order of axes and machines."""

    is_usual: bool
    """Whether the axes are in their usual order."""
    seconds: tuple[float, ...]
    """Of a byte by each rank over each axis, on its busiest link."""
    free: tuple[float, ...]
    """The same if paths carried anything."""


Ways = tuple[_Way, ...]
"""For some degrees, the usual one first."""


class PathWaits:
    """What strategies on a cluster wait for its paths: nothing where it has none, or machines of several kinds."""

    def __init__(self, cluster: Cluster, known: Constants) -> None:
        self._known = known
        self._any = not cluster.groups and bool(fabric_of(cluster).paths)
        self._fabric: Fabric | None = None
        self._ways: dict[tuple[Strategy, tuple[tuple[str, str], ...]], Ways] = {}

    def added(self, candidate: Candidate) -> Candidate:
        """The same with what it waits for paths; it is never less than without."""
        scenario, strategy = candidate.scenario, candidate.strategy
        if not self._any or strategy.world == 1 or candidate.step_s == float("inf"):
            return candidate
        traffic = axis_traffic(scenario, self._known)
        compute_s = candidate.parts.compute + candidate.parts.recompute
        waited = self._waited(scenario, strategy, traffic, hiding_of(scenario, compute_s))
        return replace(candidate, parts=replace(candidate.parts, paths=waited))

    def _waited(self, scenario: Scenario, strategy: Strategy, traffic: Sequence[AxisTraffic], hiding: Hiding) -> float:
        def waited(seconds: Sequence[float]) -> float:
            apart, beside = _sums(traffic, [one.size for one in traffic], seconds)
            return apart + hiding.seen(beside)

        times = [(waited(way.seconds), way) for way in self._of(scenario, strategy, traffic)]
        plain = best = times[0]
        # As `placement.place` chooses: what is not usual must be worth it.
        for ways in ([one for one in times if one[1].is_usual], times):
            lowest = min(ways, key=lambda one: one[0])
            best = lowest if lowest[0] < best[0] * (1 - WORTH) else best
        return for_paths((best[0], waited(best[1].free)), (plain[0], waited(plain[1].free)))

    def floor(self, scenario: Scenario, stages: int) -> PathFloor:
        """What no schedule of up to so many stages a rank, split of layers or recompute can bring the waiting below."""
        if not self._any or scenario.layout.world == 1:
            return NO_FLOOR
        strategy, traffic = scenario.layout.strategy(), least_traffic(scenario, self._known)
        ways = self._of(scenario, strategy, traffic)
        low = [one.size for one in traffic]
        high = [one.size * (stages if one.axis == "pp" else AGAIN * strategy.pp) for one in traffic]
        sums = [_differences(traffic, low, high, way.seconds, ways[0].free) for way in ways]
        return PathFloor(tuple(sums), hiding_of(scenario, 1.0))

    def _of(self, scenario: Scenario, strategy: Strategy, traffic: Sequence[AxisTraffic]) -> Ways:
        if self._fabric is None:
            self._fabric = linked(scenario)
        key = degrees_of(strategy), tuple((one.axis, one.kind) for one in traffic)
        if key not in self._ways:
            self._ways[key] = _ways(*key, self._fabric)
        return self._ways[key]


@dataclass(frozen=True)
class PathFloor:
    """A bound of what strategies with the same degrees and shards wait for paths."""

    sums: tuple[tuple[float, float, float], ...]
    """Of each order, as `_differences` has them."""
    hiding: Hiding
    """Behind a second."""

    def beside(self, least: float) -> float:
        """Seconds to add to a bound of the rest of the step, `least`.

        No more can hide than behind all of a step. Of a longer step more hides, but never as much as it is longer: the
        sum of both grows with it, and is least where the rest is.
        """
        if not self.sums:
            return 0.0
        seen = replace(self.hiding, compute_s=least * self.hiding.compute_s).seen
        # Where less is sent beside computing than in the usual order, it counts as if nothing could hide.
        found = min(
            apart + (seen(beside) - seen(free) if beside >= free else beside - free)
            for apart, beside, free in self.sums
        )
        return max(0.0, found * (1 - 1e-9))


NO_FLOOR = PathFloor((), NOTHING_HIDES)


def _sums(traffic: Sequence[AxisTraffic], sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """What axes take one after the other: those that nothing hides, and those beside computing."""
    apart = beside = 0.0
    for one, size, each in zip(traffic, sizes, seconds, strict=True):
        if one.hides:
            beside += size * each
        else:
            apart += size * each
    return apart, beside


def _differences(
    traffic: Sequence[AxisTraffic],
    low: Sequence[float],
    high: Sequence[float],
    seconds: Sequence[float],
    free: Sequence[float],
) -> tuple[float, float, float]:
    """Of sizes from low to high: the least that an order adds apart from computing; beside it the least that it takes,
    and the most that the usual order would take if paths were free."""
    more = [each - usual for each, usual in zip(seconds, free, strict=True)]
    # An axis that an order brings closer together gains the more, the more it sends.
    sizes = [one if by >= 0 else other for one, other, by in zip(low, high, more, strict=True)]
    apart, _ = _sums(traffic, sizes, more)
    closer = any(by < 0 for one, by in zip(traffic, more, strict=True) if one.hides)
    return apart, _sums(traffic, low, seconds)[1], _sums(traffic, high if closer else low, free)[1]


@lru_cache(maxsize=1024)
def _ways(strategy: Strategy, axes: tuple[tuple[str, str], ...], fabric: Fabric) -> Ways:
    """The usual order, and others that may be better for some traffic over these axes."""
    traffic = [AxisTraffic(axis, kind, 1.0) for axis, kind in axes]
    given = tuple(fabric.nodes)
    free = replace(fabric, paths=())
    every = orders(strategy) if len(given) <= MANY else [AXES]
    found: dict[_Way, None] = {}
    for order in every:
        loads = link_loads(strategy, order, traffic, fabric)
        without = tuple(load.seconds(free, given) for load in loads)
        for nodes in _nodes(loads, fabric, given, QUICK_EDGES / len(every)):
            found[_Way(order == AXES, tuple(load.seconds(fabric, nodes) for load in loads), without)] = None
    return tuple(found)


def _nodes(loads: Sequence[LinkLoad], fabric: Fabric, given: Nodes, edges: float) -> list[Nodes]:
    """Orders of machines to look at, the given one first."""
    if not fabric.paths or len(set(fabric.counts)) > 1:
        return [given]
    if factorial(len(given)) <= QUICK:
        return list(permutations(given))
    best = best_nodes(loads, fabric, given, sum, 0.0, Effort(edges, QUICK))
    return [*dict.fromkeys([*starts(loads, fabric, given), best])]
