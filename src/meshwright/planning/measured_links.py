"""How long collectives take where `meshwright bench comm` has measured some: by its lines. No torch.

A group of a shape that was measured takes what its line says. For another shape the nearest line is carried over as
`links` has it: latencies grow with the logarithm of the ranks, or of the domains where there are several; bytes are
those that a rank carries inside its domain, or out of it. What nothing was measured of is estimated as before.
"""

from __future__ import annotations

from math import log2

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.link_lines import LinkLine
from meshwright.comm.bandwidth import bus_factor
from meshwright.planning.links import Group, Links
from meshwright.planning.software import Common

HALVES = ("all_gather", "reduce_scatter")


def links_of(cluster: Cluster, common: Common) -> Links:
    """The links of a cluster: measured ones, where there are some."""
    return MeasuredLinks(cluster, common) if cluster.lines else Links(cluster, common)


class MeasuredLinks(Links):
    """Times of collectives by measured lines."""

    def __init__(self, cluster: Cluster, common: Common) -> None:
        super().__init__(cluster, common)
        self.node = cluster.node
        self.lines = [(line, _shape(cluster, line)) for line in cluster.lines]

    def __str__(self) -> str:
        newest = max(line.when for line, _ in self.lines)[:10]
        shapes = sorted({(shape.domains, shape.inside) for _, shape in self.lines})
        told = ", ".join(f"{inside}" if domains == 1 else f"{domains} x {inside}" for domains, inside in shapes)
        return f"links measured here on {newest} by bench comm (groups of {told} ranks)"

    def half(self, group: Group, size: float, kind: str = "all_gather") -> float:
        if group.size <= 1 or size <= 0:
            return 0.0
        for operation in (kind, *HALVES):
            seconds = self._seconds(operation, group, size)
            if seconds is not None:
                return seconds
        # A sum is a scatter and a gather.
        whole = self._seconds("all_reduce", group, size)
        return super().half(group, size, kind) if whole is None else whole / 2

    def all_reduce(self, group: Group, size: float) -> float:
        if group.size <= 1 or size <= 0:
            return 0.0
        seconds = self._seconds("all_reduce", group, size)
        return super().all_reduce(group, size) if seconds is None else seconds

    def exchange(self, group: Group, size: float, copies: float = 1.0) -> float:
        if group.size <= 1 or size <= 0:
            return 0.0
        crossing = 1.0
        if copies > 1 and group.domains > 1:
            # Rows for several ranks of one domain cross the network once.
            crossing = min(1.0, group.domains * (1 - (1 - 1 / group.domains) ** copies) / copies)
        seconds = self._seconds("all_to_all", group, size * crossing)
        return super().exchange(group, size, copies) if seconds is None else seconds

    def send(self, size: float, far: bool) -> float:
        seconds = self._seconds("send_receive", Group(2, 1 if far else 2), size)
        return super().send(size, far) if seconds is None else seconds

    def _seconds(self, operation: str, group: Group, size: float) -> float | None:
        """By the line that is nearest to a group; None where none is of its kind."""
        fitting = [
            (line, shape)
            for line, shape in self.lines
            if line.operation == operation and (shape.domains == 1) == (group.domains == 1)
        ]
        if not fitting:
            return None
        line, shape = min(fitting, key=lambda one: self._distance(one[0], one[1], group))
        latency = line.latency_s * _steps(group) / _steps(shape)
        carried = _carried(operation, group) / _carried(operation, shape)
        return latency - line.latency_s + line.line.seconds(size * bus_factor(operation, shape.size) * carried)

    def _distance(self, line: LinkLine, shape: Group, group: Group) -> tuple[float, ...]:
        """How far a line is from a group: by how many share a domain, by ranks, by who else is at work; then by age."""
        inside, size = abs(log2(shape.inside / group.inside)), abs(log2(shape.size / group.size))
        others = abs(log2(line.node / self.node))
        return inside + size, inside, others, -_time(line.when), line.bandwidth


def _shape(cluster: Cluster, line: LinkLine) -> Group:
    """The group that a line was measured in, by the domains of fast links that machines have or are in."""
    if line.inside >= line.ranks:
        # Within one machine, however many ranks the planned ones have: it says nothing about what is between machines.
        return Group(line.ranks, line.ranks)
    wider = max(1, cluster.domain // cluster.node)
    return Group(line.ranks, max(1, min(line.ranks, line.inside * wider, max(cluster.domain, 1))))


def _steps(group: Group) -> float:
    """How often a collective's latency comes, as far as it grows with the group."""
    return 1 + log2(group.size if group.domains == 1 else group.domains)


def _carried(operation: str, group: Group) -> float:
    """Of a collective's bytes what a rank carries: inside its domain, or out of it where there are several."""
    if group.domains == 1 or operation in ("send_receive", "broadcast"):
        return bus_factor(operation, group.size)
    leaving = (group.domains - 1) / group.domains
    if operation == "all_to_all":
        return leaving
    return leaving / group.inside * (2 if operation == "all_reduce" else 1)


def _time(when: str) -> float:
    """Of an ISO date as a number that grows with it."""
    return float("".join(letter for letter in when[:19] if letter.isdecimal()) or 0)
