"""The latency and the bandwidth that measured times follow from: a line, with a bend where one is plain to see.

A bend has its reason: above the size of a socket's buffers both ends of a link wait for each other, above that of a
cache memory is slower. What is off is counted in shares of what was measured, and in absolute ones, not in squares: a
size during which the machine did something else counts as one. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.comm.bandwidth import Line

Points = Sequence[tuple[float, float]]
"""Bytes over the link, seconds."""
_TURNS, _NEAR = 30, 1e-3
"""How often a line is drawn anew, and what counts as on it."""
_ROUNDED = 1e-9
"""A share of a time that is nothing."""
_LEAST, _BETTER = 0.05, 0.5
"""A line that is off by less is straight; a bend must take away this share of what it is off."""


def fit(points: Points) -> Line | None:
    """The straight line nearest to points; None without two."""
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    sizes, seconds = _columns(points)
    found = _nearest(np.stack([np.ones_like(sizes), sizes]), seconds)
    # Noise can turn either around; then the other explains all.
    if found[0] < 0:
        found = np.concatenate([[0.0], _nearest(sizes[None], seconds)])
    # Of times that are all the same a slope is left that is nothing but rounding.
    if found[1] * sizes.max() <= _ROUNDED * found[0]:
        (latency,) = _nearest(np.ones_like(sizes)[None], seconds)
        return Line(float(latency), float("inf"))
    return Line(float(found[0]), float(1 / found[1]))


def fit_bent(points: Points) -> Line | None:
    """The same, with a bend at one of the sizes if the points have one."""
    straight = fit(points)
    if straight is None or (off := error(straight, points)) < _LEAST:
        return straight
    # Two sizes on each side at least: of fewer a bend would follow from one measurement.
    between = sorted({size for size, _ in points})[1:-2]
    bent = [line for bend in between if (line := _bent_at(bend, points)) is not None]
    best = min(bent, key=lambda line: error(line, points), default=straight)
    return best if error(best, points) < _BETTER * off else straight


def error(line: Line, points: Points) -> float:
    """By which share the points are off a line, on average."""
    return sum(abs(line.seconds(size) / seconds - 1) for size, seconds in points) / len(points)


def _bent_at(bend: float, points: Points) -> Line | None:
    """The nearest line that bends there; None where it would fall, or begin below nothing."""
    sizes, seconds = _columns(points)
    sides = [np.minimum(sizes, bend), np.maximum(sizes - bend, 0.0)]
    found = _nearest(np.stack([np.ones_like(sizes), *sides]), seconds)
    if found[0] < 0:
        found = np.concatenate([[0.0], _nearest(np.stack(sides), seconds)])
    latency, slope, beyond = (float(one) for one in found)
    return Line(latency, 1 / slope, bend, 1 / beyond) if slope > 0 and beyond > 0 else None


def _columns(points: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes, seconds = np.array(points, dtype=np.float64).T
    return sizes, seconds


def _nearest(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """By what to multiply each row of terms so that their sum over the seconds is nearest to one."""
    scales = terms.max(axis=1)
    shares = (terms / scales[:, None] / seconds).T
    weights = np.ones(len(seconds))
    for _ in range(_TURNS):
        # Squares over what they were the last time are absolute values in the end.
        found, *_ = np.linalg.lstsq(shares * weights[:, None] ** 0.5, weights**0.5, rcond=None)
        weights = 1 / np.maximum(np.abs(shares @ found - 1), _NEAR)
    return np.asarray(found / scales)
