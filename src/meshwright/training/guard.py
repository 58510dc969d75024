"""Whether the numbers of a step are fit to learn from: finite, and no spike. Every rank comes to the same verdict.

It rests on sums over all ranks alone, taken before a weight is changed, so one rank's fault is everybody's.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.config import ElasticSection

FEWEST = 16
"""How many steps a spike must be compared with."""

LEAST_DEVIATION = 1e-3
"""The smallest deviation of a series, relative to its middle: in a flat one a millionth more is no spike."""


class Verdict(NamedTuple):
    """What is wrong with a step, if anything."""

    nonfinite: bool = False
    """The loss or the gradients are no numbers."""
    spike: bool = False
    """The loss, or the norm of the gradients, is far above what it was."""
    learn: bool = True
    """Whether weights and optimizer may be updated."""


class Guard:
    """Judges steps one after the other; remembers the last ones to tell a spike."""

    def __init__(self, settings: ElasticSection) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._norms: deque[float] = deque(maxlen=settings.spike_window)

    def judge(self, loss: float, norm: float) -> Verdict:
        """The verdict on a step of this loss and gradient norm (or any multiple of it, as long as it is the same)."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict(nonfinite=True, learn=False)
        settings = self._settings
        if not (settings.spike or settings.spike_norm):
            return Verdict()
        highest_loss, highest_norm = self._highest()
        spike = loss > highest_loss or norm > highest_norm
        # Spikes are kept too: a level that stays is the new normal once it fills half of the window.
        self._losses.append(loss)
        self._norms.append(norm)
        return Verdict(spike=spike, learn=not (spike and settings.spike_policy == "skip"))

    def limits(self) -> tuple[float, float]:
        """The highest loss and gradient norm that the next step may have to be learned from, before it is judged."""
        skips = self._settings.spike_policy == "skip"
        return self._highest() if skips else (math.inf, math.inf)

    def _highest(self) -> tuple[float, float]:
        settings = self._settings
        return _highest(self._losses, settings.spike), _highest(self._norms, settings.spike_norm)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember, so that a resumed run comes to the same verdicts."""
        return {"guard": {"losses": list(self._losses), "norms": list(self._norms)}} if self._losses else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint remembers."""
        held = state.get("guard", {"losses": (), "norms": ()})
        for series, values in ((self._losses, held["losses"]), (self._norms, held["norms"])):
            series.clear()
            series.extend(values)


def _highest(before: deque[float], threshold: float) -> float:
    """That many deviations above the median of a series; by the median, which spikes do not move."""
    if not threshold or len(before) < min(FEWEST, before.maxlen or FEWEST):
        return math.inf
    middle = statistics.median(before)
    # 1.4826 times the median distance from the median is the standard deviation, where values are normal.
    deviation = 1.4826 * statistics.median(abs(one - middle) for one in before)
    return middle + threshold * max(deviation, LEAST_DEVIATION * abs(middle))
