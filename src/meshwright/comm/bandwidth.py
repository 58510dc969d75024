"""Bandwidths of collectives as nccl-tests counts them, and what they follow from: a latency and a bandwidth. No torch.

The algorithm's bandwidth is the size over the time. The bus bandwidth is what a link must have carried for that, which
can be held against its data sheet whatever the operation and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def seconds(self, size: float) -> float:
        """Of so many bytes over the link."""
        return self.latency_s + size / self.bandwidth


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line nearest to points of (bytes over the link, seconds), each off by a share of itself; None without two."""
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    # Least squares of (latency + slope * size) / seconds = 1.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, ab, bb = (sum(x * y for x, y in zip(one, other, strict=True)) for one, other in _pairs(rows))
    a, b = (sum(column) for column in zip(*rows, strict=True))
    determinant = aa * bb - ab * ab
    latency, slope = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    # Noise can turn either around; then the other explains all.
    if latency < 0:
        latency, slope = 0.0, b / bb
    if slope <= 0:
        return Line(a / aa, float("inf"))
    return Line(latency, 1 / slope)


def _pairs(rows: Sequence[tuple[float, float]]) -> tuple[tuple[list[float], list[float]], ...]:
    first, second = [row[0] for row in rows], [row[1] for row in rows]
    return (first, first), (first, second), (second, second)
