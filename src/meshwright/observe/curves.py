"""The curves of a run: a column of numbers for each metric, a row for each step, and few points of many to draw."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any

SERIES = (
    "loss",
    "eval_loss",
    "loss_max",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "step_s",
    "eval_s",
    "pipeline_idle",
    "pipeline_idle_predicted",
    "loss_scale",
    "spike_score",
    "sent_mib",
    "sent_share",
    "skipped",
)
RATES = ("tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu")
"""What is done in a second: over several steps, by all of their time."""
_KNOWN = frozenset(SERIES)
RECENT_STEPS = 50
"""How many of the last steps stand for how fast a run is now."""


def number(value: object) -> float | None:
    """A finite number, or None for everything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def sent_whole(share: float) -> bool:
    """Whether gradients that were so much of what they are uncompressed went as they are: in vain it may be more."""
    return share == 1


class Curve:
    """The values of one metric, in the order of steps."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def put(self, step: int, value: float | None) -> None:
        """Take the value of a step, also of one that has a value already; None takes it away."""
        if not self.steps or step > self.steps[-1]:
            if value is not None:
                self.steps.append(step)
                self.values.append(value)
            return
        place = bisect_left(self.steps, step)
        known = self.steps[place] == step
        if known and value is None:
            del self.steps[place], self.values[place]
        elif known and value is not None:
            self.values[place] = value
        elif value is not None:
            self.steps.insert(place, step)
            self.values.insert(place, value)

    def at(self, step: int) -> float | None:
        """The value of a step; None where it has none."""
        place = bisect_left(self.steps, step)
        return self.values[place] if self.steps[place : place + 1] == array("q", [step]) else None


class Curves:
    """The metrics of every step; of a step that was recorded twice, the last record counts."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._all = Curve()
        """Every step, with the time of its end; NaN where the record does not say."""
        self._newest = 0
        """The step that was recorded last."""

    def __len__(self) -> int:
        return len(self._all.steps)

    @property
    def steps(self) -> array[int]:
        """All steps, in order."""
        return self._all.steps

    @property
    def times(self) -> array[float]:
        """Unix seconds at the end of each step; NaN where the record does not say."""
        return self._all.values

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return
        again = bool(self._all.steps) and step <= self._all.steps[-1]
        time = number(line.get("time"))
        self._all.put(step, math.nan if time is None else time)
        self._newest = step
        # What an earlier record of the step had and this one has not is over, too.
        for name in SERIES if again else line.keys() & _KNOWN:
            value = number(line.get(name))
            if value is not None or again:
                self._curves.setdefault(name, Curve()).put(step, value)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has one, in the order of steps."""
        curve = self._of(name)
        return list(zip(curve.steps, curve.values, strict=True))

    def thinned(self, name: str, most: int) -> tuple[list[int], list[float]]:
        """Steps and values, of which there are at most that many; `thin` says which."""
        curve = self._of(name)
        kept = kept_places(curve.values, most)
        return [curve.steps[place] for place in kept], [curve.values[place] for place in kept]

    def recent(self, name: str, count: int = RECENT_STEPS) -> list[float]:
        """The last values of a metric, at most that many."""
        return list(self._of(name).values[-count:])

    def compressed(self) -> Curves:
        """The last steps whose gradients were compressed, by themselves; at most RECENT_STEPS."""
        shares, found = self._of("sent_share"), Curves()
        newest_first = zip(reversed(shares.steps), reversed(shares.values), strict=True)
        backwards = (step for step, share in newest_first if not sent_whole(share))
        for step in reversed(list(islice(backwards, RECENT_STEPS))):
            found.add({"step": step} | {name: curve.at(step) for name, curve in self._curves.items()})
        return found

    def mean(self, name: str) -> float | None:
        """The mean of the last steps that have the metric, of a rate over their time: what displays call speed."""
        recent = self.recent(name)
        if not recent:
            return None
        taken = dict(self.points("step_s")[-2 * RECENT_STEPS :]) if name in RATES else {}
        seconds = [taken.get(step, 0.0) for step in self._of(name).steps[-len(recent) :]]
        return fmean(recent, seconds) if min(seconds) > 0 else fmean(recent)

    def averaged(self, name: str) -> int:
        """Over how many steps `mean` goes: RECENT_STEPS, or fewer in a young run."""
        return len(self.recent(name))

    def last(self, name: str) -> float | None:
        """The newest value, of whichever step had one."""
        values = self._of(name).values
        return values[-1] if values else None

    def last_time(self) -> float | None:
        """When the newest step ended."""
        place = bisect_left(self._all.steps, self._newest)
        time = self._all.values[place] if len(self) else math.nan
        return time if time == time else None

    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return self._newest

    def _of(self, name: str) -> Curve:
        return self._curves.get(name) or Curve()


def thin(points: list[tuple[int, float]], most: int = 2000) -> list[tuple[int, float]]:
    """At most that many of the points: of each bucket the lowest and the highest, and the last point of all.

    Buckets are a power of two wide and begin at the same points whatever follows, so that a curve that grows keeps
    what was drawn of it until the buckets double.
    """
    return [points[place] for place in kept_places(array("d", (value for _, value in points)), most)]


def kept_places(values: array[float], most: int) -> Sequence[int]:
    """Which of some values `thin` keeps."""
    if len(values) <= most:
        return range(len(values))
    width = 1
    while 2 * -(-len(values) // width) + 1 > most:
        width *= 2
    found: list[int] = []
    for start in range(0, len(values), width):
        bucket = values[start : start + width]
        low, high = start + bucket.index(min(bucket)), start + bucket.index(max(bucket))
        found += sorted({low, high})
    if found[-1] != len(values) - 1:
        found.append(len(values) - 1)
    return found
