"""The curves of a run: a column of numbers for each metric, a row for each step, and few points of many to draw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
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
)
MISSING = math.nan


def number(value: object) -> float | None:
    """A finite number, or None for everything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


class Curves:
    """The metrics of every step; of a step that was recorded twice, the last record counts."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        """Unix seconds at the end of a step; NaN where the record does not say."""
        self._columns = {name: array("d") for name in SERIES}
        self._rows: dict[int, int] = {}
        self._newest = -1
        """The row of the record that came last."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return
        row = self._newest = self._rows.setdefault(step, len(self.steps))
        time = number(line.get("time"))
        values = {name: number(line.get(name)) for name in SERIES}
        if row == len(self.steps):
            self.steps.append(step)
            self.times.append(MISSING)
            for column in self._columns.values():
                column.append(MISSING)
        self.times[row] = MISSING if time is None else time
        for name, value in values.items():
            self._columns[name][row] = MISSING if value is None else value

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has one, in the order of steps."""
        found = [(step, value) for step, value in zip(self.steps, self._columns[name], strict=True) if value == value]
        if any(later[0] < earlier[0] for earlier, later in zip(found, found[1:], strict=False)):
            found.sort()
        return found

    def recent(self, name: str, count: int) -> list[float]:
        """The last values of a metric, of at most that many steps."""
        return [value for value in self._columns[name][-count:] if value == value]

    def total(self, name: str) -> float:
        """The sum over all steps."""
        return math.fsum(value for value in self._columns[name] if value == value)

    def last(self, name: str) -> float | None:
        """The newest value, of whichever step had one."""
        return next((value for value in reversed(self._columns[name]) if value == value), None)

    def last_time(self) -> float | None:
        """When the newest step ended."""
        time = self.times[self._newest] if len(self.times) else MISSING
        return time if time == time else None

    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return self.steps[self._newest] if len(self.steps) else 0


def thin(points: list[tuple[int, float]], most: int = 2000) -> list[tuple[int, float]]:
    """At most that many of the points: of each bucket the lowest and the highest, and the last point of all.

    Buckets are a power of two wide and begin at the same points whatever follows, so that a curve that grows keeps
    what was drawn of it until the buckets double.
    """
    if len(points) <= most:
        return points
    width = 1
    while 2 * -(-len(points) // width) + 1 > most:
        width *= 2
    found = list(_extremes(points, width))
    if found[-1] != points[-1]:
        found.append(points[-1])
    return found


def _extremes(points: list[tuple[int, float]], width: int) -> Iterator[tuple[int, float]]:
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        low, high = min(bucket, key=_value), max(bucket, key=_value)
        yield from _once(sorted((low, high)))


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _once(points: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    before = None
    for point in points:
        if point != before:
            yield point
        before = point
