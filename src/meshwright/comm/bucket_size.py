"""How many bytes of gradients should travel together. No torch."""

from __future__ import annotations

from math import sqrt

from meshwright.comm.bandwidth import Line

LEAST = 1 << 20
"""Smaller buckets cost the host more than they hide."""


def best_bucket(total: int, line: Line) -> float:
    """The size for gradients of so many bytes, whose sums take a latency and a time for each byte.

    Every bucket costs a latency, and the last one travels when the backward pass is over: with buckets of b bytes that
    is total / b latencies and b bytes, which is least for b = sqrt(total x latency x bandwidth).
    """
    if line.bandwidth == float("inf"):
        return float(total)
    return min(float(total), max(float(LEAST), sqrt(total * line.latency_s * line.bandwidth)))
