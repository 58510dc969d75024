"""How long collectives take: latency and bandwidth, inside a domain of fast links and between them. No torch.

Ranks are placed in order, so a group is known by its size and by how far its members are apart. Where several of its
ranks sit in one domain they share the work: each sends through its own network card (hierarchical, as NCCL does it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from meshwright.cluster.cluster import Cluster
from meshwright.planning.software import Common


@dataclass(frozen=True)
class Group:
    """Ranks that communicate."""

    size: int
    inside: int
    """How many of them share a domain of fast links."""

    @property
    def domains(self) -> int:
        return -(-self.size // self.inside)


def group_of(cluster: Cluster, size: int, stride: int) -> Group:
    """The group of that many ranks, so far apart."""
    return Group(size, max(1, min(size, cluster.domain // stride)))


class Links:
    """Times of collectives on a cluster, in seconds; sizes are bytes of the whole tensor unless said otherwise."""

    def __init__(self, cluster: Cluster, common: Common) -> None:
        if cluster.calibration is not None:
            latency = cluster.calibration.latency_s
            common = replace(common, link=1.0, nic=1.0, link_latency_s=latency, nic_latency_s=latency)
        self.common = common
        self.link = cluster.link * 1e9 * common.link
        self.nic = cluster.nic * 1e9 * common.nic

    def half(self, group: Group, size: float) -> float:
        """All-gather or reduce-scatter of a tensor."""
        if group.size <= 1 or size <= 0:
            return 0.0
        common = self.common
        if group.domains == 1:
            return common.link_latency_s * (1 + log2(group.size)) + size * (group.size - 1) / group.size / self.link
        outer = group.domains
        # Each rank's card carries what leaves its domain; inside, the rest goes over the fast links meanwhile.
        between = size / group.inside * (outer - 1) / outer / self.nic
        within = size * (group.inside - 1) / group.inside / self.link if group.inside > 1 else 0.0
        latency = common.nic_latency_s * (1 + log2(outer)) + common.link_latency_s * (1 + log2(group.inside))
        return latency + max(between, within)

    def all_reduce(self, group: Group, size: float) -> float:
        """A sum that every rank gets."""
        return 2 * self.half(group, size)

    def exchange(self, group: Group, size: float, copies: float = 1.0) -> float:
        """All-to-all; `size` is what one rank sends to all. `copies` is how many others each row goes to.

        Rows for several ranks of one domain cross the network once (as expert-parallel exchanges do it now).
        """
        if group.size <= 1 or size <= 0:
            return 0.0
        common = self.common
        leaving = size * (group.domains - 1) / group.domains
        if copies > 1 and group.domains > 1:
            # Of `copies` targets, so many different domains on average.
            distinct = group.domains * (1 - (1 - 1 / group.domains) ** copies)
            leaving = size / copies * distinct * (group.domains - 1) / group.domains
        staying = size * (group.size - 1) / group.size
        latency = common.nic_latency_s * 2 if group.domains > 1 else common.link_latency_s * 2
        return latency + max(leaving / (self.nic * common.all_to_all), staying / (self.link * common.all_to_all))

    def send(self, size: float, far: bool) -> float:
        """From one rank to another."""
        return (self.common.nic_latency_s + size / self.nic) if far else (self.common.link_latency_s + size / self.link)
