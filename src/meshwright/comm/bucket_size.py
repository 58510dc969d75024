"""How many bytes of gradients travel together, and how many should. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from meshwright.comm.bandwidth import Line

LEAST = 1 << 20
"""Smaller buckets cost the host more than they hide."""


def buckets_of(shapes: Sequence[Sequence[int]], limit: float, element: int = 4) -> list[list[Sequence[int]]]:
    """Parameters that travel together, as DDP deals them out: as their gradients come, the last ones first.

    A bucket is closed by the parameter that fills it, so it may hold more than the limit.
    """
    found: list[list[Sequence[int]]] = []
    held, size = [], 0
    for shape in reversed(shapes):
        held.append(shape)
        size += prod(shape) * element
        if size >= limit:
            found.append(held)
            held, size = [], 0
    return [*found, held] if held else found


def best_bucket(total: int, line: Line) -> float:
    """The size for gradients of so many bytes, whose sums take a latency and a time for each byte.

    Every bucket costs a latency, and the last one travels when the backward pass is over: with buckets of b bytes that
    is total / b latencies and b bytes, which is least for b = sqrt(total x latency x bandwidth).
    """
    if line.bandwidth == float("inf"):
        return float(total)
    return min(float(total), max(float(LEAST), sqrt(total * line.latency_s * line.bandwidth)))
