"""A placement in words and numbers: what lies inside a node, what across, and what goes over which link. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.axis_order import short
from meshwright.planning.group_words import placed
from meshwright.planning.link_loads import LinkLoad
from meshwright.planning.placement import Placement, links_known, placements_of
from meshwright.planning.question import Candidate

NAMES = {
    "state": "dp, shards",
    "loss": "dp",
    "replicate": "dp, copies",
    "copies": "experts' copies",
    "expert_state": "experts' shards",
}
"""Axes that are made of others, or are known by another name, in words."""


def placement_text(candidate: Candidate) -> str:
    """Where the axes lie, in lines."""
    return "\n".join(_lines(candidate))


def _lines(candidate: Candidate) -> Iterator[str]:
    strategy, cluster = candidate.strategy, candidate.scenario.cluster
    if strategy.world == 1:
        yield "placement  one rank"
        return
    best, plain = placements_of(candidate)
    yield f"placement  {' · '.join(f'{axis}={degree} {where}' for axis, degree, where in axes_of(best, candidate))}"
    yield (
        f"  on {cluster.nodes} machine{'s' * (cluster.nodes > 1)} of {cluster.node}, fast links between "
        f"{cluster.domain}; axes from the outermost: {short(best.order, strategy)}"
    )
    if names := node_names(best):
        yield f"  machines in the order of the ranks: {' '.join(names)}"
    if best.key != plain.key:
        waits = _number(plain.seconds), _number(best.seconds)
        yield f"  in order, the step would wait {waits[0]} s for links instead of {waits[1]} s"
    elif links_known(cluster):
        yield "  no other order is faster by the bandwidths that are known"
    yield from (f"  {one}" for one in placed(candidate))
    if best.loads:
        yield "GB a step, one way  by a rank  inside a node  over its card  out of a node  busiest link"
    for load in best.loads:
        sizes = (load.traffic.size, load.inside, load.card, load.uplink)
        told = "  ".join(f"{_number(size / 1e9):>{wide}}" for size, wide in zip(sizes, (9, 13, 13, 13), strict=True))
        name = NAMES.get(load.traffic.axis, load.traffic.axis)
        yield f"  {name:<17} {told}  {_share(load, best, candidate)}"


def _share(load: LinkLoad, placement: Placement, candidate: Candidate) -> str:
    """For how much of the step an axis's busiest link is at work."""
    seconds = load.seconds(placement.fabric, placement.nodes)
    if not 0 < candidate.step_s < float("inf"):
        return f"{_number(seconds)} s"
    beside = ", beside computing" if load.traffic.hides and placement.hiding.overlap else ""
    return f"{_number(seconds)} s, {seconds / candidate.step_s:.0%} of the step{beside}"


def _number(value: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def axes_of(placement: Placement, candidate: Candidate) -> list[tuple[str, int, str]]:
    """Each axis of more than one rank, the innermost first, and where it lies."""
    strategy, inside = candidate.strategy, placement.fabric.counts[0]
    node = "a node" if candidate.scenario.cluster.domain == candidate.scenario.cluster.node else "the fast links"
    found, reach = [], 1
    for axis in reversed(placement.order):
        degree = getattr(strategy, axis)
        if degree > 1:
            within = max(1, min(degree, inside // reach))
            where = f"inside {node}" if within >= degree else f"{within} inside {node}, {-(-degree // within)} across"
            name = "dp" if axis in ("replicate", "shard") and degree == strategy.dp else axis
            found.append((name, degree, "across nodes" if within == 1 else where))
        reach *= degree
    return found


def node_names(placement: Placement) -> list[str]:
    """Machines in the order of the ranks, where that is not the one they were given in."""
    if list(placement.nodes) == sorted(placement.nodes):
        return []
    names = placement.fabric.names
    return [names[node] if names else str(node) for node in placement.nodes]


def placement_json(candidate: Candidate) -> dict[str, Any]:
    """The same as data."""
    best, plain = placements_of(candidate)
    return {
        "order": short(best.order, candidate.strategy),
        "nodes": node_names(best) or list(best.fabric.names),
        "axes": [{"axis": axis, "degree": degree, "where": where} for axis, degree, where in axes_of(best, candidate)],
        "seconds": round(best.seconds, 6),
        "seconds_in_order": round(plain.seconds, 6),
        "traffic": [
            {
                "axis": load.traffic.axis,
                "kind": load.traffic.kind,
                "rank_bytes": round(load.traffic.size),
                "inside_bytes": round(load.inside),
                "card_bytes": round(load.card),
                "node_bytes": round(load.uplink),
                "seconds": round(load.seconds(best.fabric, best.nodes), 6),
                "beside_computing": load.traffic.hides,
            }
            for load in best.loads
        ],
    }
