"""Bandwidths of collectives as nccl-tests counts them, and the times that they stand for. No torch.

The algorithm's bandwidth is the size over the time. The bus bandwidth is what a link must have carried for that, which
can be held against its data sheet whatever the operation and the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple


def bus_factor(operation: str, ranks: int) -> float:
    """What a link carries of the bytes of a collective over so many ranks."""
    if ranks < 2:
        return 1.0
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(
        operation, 1.0
    )


class Line(NamedTuple):
    """Times that grow with what goes over a link: latency + bytes / bandwidth."""

    latency_s: float
    bandwidth: float
    """Bytes per second."""
    bend: float | None = None
    """From how many bytes over the link another bandwidth holds; None where one holds for all."""
    beyond: float | None = None
    """That bandwidth."""

    def seconds(self, size: float) -> float:
        """Of so many bytes over the link."""
        if self.bend is None or self.beyond is None or size <= self.bend:
            return self.latency_s + size / self.bandwidth
        return self.latency_s + self.bend / self.bandwidth + (size - self.bend) / self.beyond
