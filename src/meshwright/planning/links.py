"""How long collectives take: latency and bandwidth, inside a domain of fast links and between them. No torch.

Ranks are placed in order, so a group is known by its size and by how far its members are apart. Where several of its
ranks sit in one domain they share the work: each sends through its own network card (hierarchical, as NCCL does it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2

from meshwright.cluster.calibration import Points
from meshwright.cluster.cluster import Cluster
from meshwright.planning.software import Common


@dataclass(frozen=True)
class Group:
    """Ranks that communicate."""

    size: int
    inside: int
    """How many of them share a domain of fast links."""
    axis: str = ""
    """What they share, where somebody asks: an axis of the mesh, or one made of several."""

    @property
    def domains(self) -> int:
        return -(-self.size // self.inside)


def group_of(cluster: Cluster, size: int, stride: int, axis: str = "") -> Group:
    """The group of that many ranks, so far apart."""
    return Group(size, max(1, min(size, cluster.domain // stride)), axis)


@lru_cache(maxsize=4096)
def far_borders(domain: int, width: int, ranks: int) -> tuple[bool, ...]:
    """For each pipeline rank, whether something that it sends to the next one leaves a domain; the last one's next is
    the first. Pipeline ranks are that many chips wide, and lie one after the other."""
    return tuple(
        any(
            (rank * width + chip) // domain != ((rank + 1) % ranks * width + chip) // domain
            for chip in range(min(width, domain))
        )
        for rank in range(ranks)
    )


class Links:
    """Times of collectives on a cluster, in seconds; sizes are bytes of the whole tensor unless said otherwise."""

    def __init__(self, cluster: Cluster, common: Common) -> None:
        self.common = common
        self.link = cluster.link * 1e9 * common.link
        if cluster.speeds is not None and cluster.speeds.collectives.get("all_gather"):
            self._take_measured(cluster.speeds.collectives["all_gather"])
        self.nic = cluster.nic * 1e9 * common.nic

    def _take_measured(self, gathers: Mapping[str, Points]) -> None:
        """Latency and bandwidth of the fast links from gathers of the smallest and the largest tensor."""
        ranks = max(int(size) for size in gathers)
        small, large = gathers[str(ranks)][0], gathers[str(ranks)][-1]
        self.common = replace(self.common, link_latency_s=small[1] / (1 + log2(ranks)))
        if large[1] > small[1]:
            self.link = large[0] * (ranks - 1) / ranks / (large[1] - small[1])

    def half(self, group: Group, size: float, kind: str = "all_gather") -> float:
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

    def unit(self, group: Group, size: float, kind: str = "all_gather") -> float:
        """The gather or scatter of a module whose parameters are sharded."""
        return self.half(group, size, kind)

    def tensor(self, group: Group, size: float, sp: bool, once_more: bool) -> tuple[float, float]:
        """Tensor-parallel collectives of a layer, forward and backward: two sums each, or four halves.

        `once_more`: the backward pass gathers inputs that the forward pass did not keep.
        """
        once = 4 * self.half(group, size)
        return once, once * (1.25 if once_more else 1.0)

    def ring(self, group: Group, size: float, forward: float, backward: float) -> tuple[float, float]:
        """Passing one rank's keys and values around, what attention forward and backward does not hide of it."""
        passed = self.half(group, size * group.size)
        start = passed / group.size
        return max(start, passed - forward), max(2 * start, 2 * passed - backward)

    def ulysses(self, group: Group, size: float) -> tuple[float, float]:
        """Exchanging heads for tokens and back, forward and backward."""
        once = self.exchange(group, size)
        return once, once

    def experts(self, group: Group, size: float, copies: float) -> tuple[float, float]:
        """Rows to the experts and back, forward and backward."""
        once = 2 * self.exchange(group, size, copies)
        return once, once

    def send(self, size: float, far: bool) -> float:
        """From one rank to another."""
        return (self.common.nic_latency_s + size / self.nic) if far else (self.common.link_latency_s + size / self.link)
