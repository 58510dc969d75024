"""Bandwidths of collectives as nccl-tests counts them, and what they follow from: a latency and a bandwidth. No torch.

The algorithm's bandwidth is the size over the time. The bus bandwidth is what a link must have carried for that, which
can be held against its data sheet whatever the operation and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TURNS, _NEAR = 30, 1e-3
"""How often a line is drawn anew, and what counts as on it."""


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
    """The line nearest to points of (bytes over the link, seconds), each off by a share of itself; None without two.

    Of absolute shares, not of their squares: a size during which the machine did something else counts as one.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    weights = [1.0] * len(points)
    for _ in range(_TURNS):
        found = _weighted(points, weights)
        # Squares over what they were the last time are absolute values in the end.
        weights = [1 / max(abs(found.seconds(size) / seconds - 1), _NEAR) for size, seconds in points]
    return found


def _weighted(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> Line:
    """Least squares of (latency + slope * size) / seconds = 1."""
    rows = [(1 / seconds, size / seconds, weight) for (size, seconds), weight in zip(points, weights, strict=True)]
    aa, ab, bb = (sum(w * x * y for x, y, w in of) for of in _products(rows))
    a, b = (sum(row[column] * row[2] for row in rows) for column in (0, 1))
    determinant = aa * bb - ab * ab
    # One point may outweigh all others.
    single = determinant <= 1e-15 * aa * bb
    latency, slope = (0.0, b / bb) if single else ((a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant)
    # Noise can turn either around; then the other explains all.
    if latency < 0:
        latency, slope = 0.0, b / bb
    if slope <= 0:
        return Line(a / aa, float("inf"))
    return Line(latency, 1 / slope)


def _products(rows: Sequence[tuple[float, float, float]]) -> tuple[list[tuple[float, float, float]], ...]:
    return (
        [(x, x, w) for x, _, w in rows],
        [(x, y, w) for x, y, w in rows],
        [(y, y, w) for _, y, w in rows],
    )
