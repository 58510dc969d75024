"""Placement: which axis of a strategy lies inside nodes and which across, and which node stands where. No torch.

Every order of axes is tried. Where nodes differ in their links, so is every order of nodes, as far as that can be done
in a moment; beyond, `node_order` looks for a good one. The same question has the same answer always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.axis_order import AXES, Order, orders
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.fabric import Fabric, fabric_of
from meshwright.planning.axis_traffic import AxisTraffic, axis_traffic
from meshwright.planning.link_loads import LinkLoad, link_loads
from meshwright.planning.measured import operations_of
from meshwright.planning.node_order import EDGES, Effort, best_nodes
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import constants
from meshwright.strategy import Strategy

if TYPE_CHECKING:
    from meshwright.planning.question import Candidate

WORTH = 0.05
"""What another order must save of the waiting to be taken: the usual one needs no explaining."""


@dataclass(frozen=True)
class Hiding:
    """What runs beside computing: seconds of it, the share that is free of waiting, and what it costs beside."""

    compute_s: float = 0.0
    overlap: float = 0.0
    contention: float = 0.0

    def seen(self, seconds: float) -> float:
        """Of communication that could hide, the seconds that a step waits for it."""
        hidden = min(seconds, self.compute_s * self.overlap)
        return seconds - hidden + hidden * self.contention


NOTHING_HIDES = Hiding()


@dataclass(frozen=True)
class Placement:
    """Ranks on chips, and what that puts on the links."""

    order: Order
    """Of the axes, outermost first."""
    nodes: tuple[int, ...]
    """Of the fabric, in the order of the ranks."""
    loads: tuple[LinkLoad, ...]
    fabric: Fabric
    hiding: Hiding = NOTHING_HIDES

    @cached_property
    def seconds(self) -> float:
        """What a step waits for communication: busiest links, one axis after the other, those that hide beside."""
        return self.waited([load.seconds(self.fabric, self.nodes) for load in self.loads])

    @property
    def key(self) -> tuple[Order, tuple[int, ...]]:
        """What it is known by."""
        return self.order, self.nodes

    @cached_property
    def least(self) -> float:
        """The same if paths between nodes carried anything: no order of nodes can be below."""
        free = replace(self.fabric, paths=())
        return self.waited([load.seconds(free, self.nodes) for load in self.loads])

    def waited(self, times: Sequence[float]) -> float:
        """The same for axes that take so long each."""
        hides = [load.traffic.hides for load in self.loads]
        hidden = sum(seconds for seconds, one in zip(times, hides, strict=True) if one)
        return sum(times) - hidden + self.hiding.seen(hidden)


def place(
    strategy: Strategy,
    traffic: Sequence[AxisTraffic],
    fabric: Fabric,
    hiding: Hiding = NOTHING_HIDES,
    *,
    only: Order = (),
) -> tuple[Placement, Placement]:
    """The best placement, and the one in order; with `only`, that order of axes and the best one of nodes."""
    given = tuple(range(len(fabric.counts)))
    plain, *found = (
        Placement(order, given, link_loads(strategy, order, traffic, fabric), fabric, hiding)
        for order in [AXES, *([only] if only else orders(strategy))]
    )
    usual = found[0]
    lowest = min(found, key=lambda one: one.seconds)
    tiers = [usual]
    # Machines with other numbers of ranks stay where they are: loads are those of nodes that are alike.
    if fabric.paths and len(set(fabric.counts)) == 1:
        effort = EDGES / len(found)
        tiers.append(_with_nodes(usual, effort))
        lowest = min(lowest, tiers[1], key=lambda one: one.seconds)
        for one in sorted(found[1:], key=lambda one: one.least):
            if one.least < lowest.seconds:
                lowest = min(lowest, _with_nodes(one, effort), key=lambda one: one.seconds)
    # The usual order comes first, then the usual one of axes with machines moved: what follows must be worth it.
    best = usual
    for one in [*tiers, lowest]:
        if one.seconds < best.seconds * (1 - WORTH):
            best = one
    return best, plain


def _with_nodes(start: Placement, edges: float) -> Placement:
    """The same order of axes with the best order of nodes that is found."""
    enough = start.least * (1 + WORTH)
    if start.seconds <= enough:
        return start
    nodes = best_nodes(start.loads, start.fabric, start.nodes, start.waited, enough, Effort(edges))
    return Placement(start.order, nodes, start.loads, start.fabric, start.hiding)


def placements_of(
    candidate: Candidate, fabric: Fabric | None = None, *, only: Order = ()
) -> tuple[Placement, Placement]:
    """The best placement of a candidate's ranks on its machines, and the one in order.

    Without measured links, and on machines of several kinds, whose ranks follow the groups, both are the same.
    """
    scenario = candidate.scenario
    cluster, parts = scenario.cluster, candidate.parts
    found, fabric = axis_traffic(scenario, constants()), linked(scenario, fabric)
    finite = candidate.step_s < float("inf")
    hiding = hiding_of(scenario, parts.compute + parts.recompute) if finite else NOTHING_HIDES
    if cluster.groups or not links_known(cluster):
        given = tuple(range(len(fabric.counts)))
        plain = Placement(AXES, given, link_loads(candidate.strategy, AXES, found, fabric), fabric, hiding)
        return plain, plain
    return place(candidate.strategy, found, fabric, hiding, only=only)


def linked(scenario: Scenario, fabric: Fabric | None = None) -> Fabric:
    """The fabric, by default that of the cluster, with what is reached of its links, measured where it was."""
    fabric = fabric or fabric_of(scenario.cluster)
    if scenario.cluster.chip.key == "cpu":
        return fabric
    links = operations_of(scenario, constants()).links
    return replace(fabric, link=links.link, nic=links.nic)


def hiding_of(scenario: Scenario, compute_s: float) -> Hiding:
    """What hides behind so many seconds of computing."""
    if scenario.cluster.chip.key == "cpu":
        return NOTHING_HIDES
    return Hiding(compute_s, scenario.software.overlap, scenario.software.contention)


def with_paths(candidate: Candidate) -> Candidate:
    """The same with what its best placement waits for paths between machines; it is never less than without."""
    cluster = candidate.scenario.cluster
    if not links_known(cluster) or cluster.groups or candidate.strategy.world == 1 or candidate.step_s == float("inf"):
        return candidate
    best, plain = placements_of(candidate)
    waited = for_paths((best.seconds, best.least), (plain.seconds, plain.least))
    return replace(candidate, parts=replace(candidate.parts, paths=waited))


def for_paths(best: tuple[float, float], plain: tuple[float, float]) -> float:
    """What is waited for paths, from what the best placement and the one in order wait, with paths and without.

    The estimate without paths has what ranks in order wait for links and cards. Axes in another order may wait less for
    these too, which is not counted: most of what passes between stages hides, and here all of it would be gained.
    """
    return max(0.0, min(best[0] - min(best[1], plain[1]), plain[0] - plain[1]))


def links_known(cluster: Cluster) -> bool:
    """Whether the bandwidths between its machines were measured, or told one by one."""
    return bool(cluster.paths)
