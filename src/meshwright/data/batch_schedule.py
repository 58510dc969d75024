"""How many samples each step takes, and so how many were taken before it: the data position as a function of the step.

Written as a number (`64`), as a ramp (`"16..64 over 200"`, in steps of the first size, or `"16..64 over 200 by 8"`), or
as a list of `[first_step, batch]` pairs. Steps count from 0. A schedule has one canonical form, however it was written.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshwright.errors import DataError

_RAMP = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s+over\s+(\d+)(?:\s+by\s+(\d+))?\s*")
_FORMS = 'a number (64), a ramp ("16..64 over 200" or "16..64 over 200 by 8"), or a list of [first_step, batch] pairs'


@dataclass(frozen=True)
class BatchSchedule:
    """Stages of constant global batch: the first step of each, and its batch."""

    stages: tuple[tuple[int, int], ...]
    _positions: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0][0] != 0:
            found = f"step {self.stages[0][0]}" if self.stages else "nothing"
            raise DataError(f"a batch schedule must begin at step 0, this one begins with {found}")
        for first, batch in self.stages:
            if batch < 1:
                raise DataError(f"the batch from step {first} on is {batch}; it must be at least 1")
        for (first, _), (second, _) in pairwise(self.stages):
            if second <= first:
                raise DataError(f"in a batch schedule step {second} follows step {first}; the first steps must grow")
        merged = [self.stages[0]]
        merged += [later for earlier, later in pairwise(self.stages) if later[1] != earlier[1]]
        positions = [0]
        for (first, batch), (second, _) in pairwise(merged):
            positions.append(positions[-1] + (second - first) * batch)
        object.__setattr__(self, "stages", tuple(merged))
        object.__setattr__(self, "_positions", tuple(positions))

    @classmethod
    def parse(cls, value: int | str | Sequence[Any]) -> BatchSchedule:
        """The schedule that a setting describes."""
        if isinstance(value, str):
            if re.fullmatch(r"\s*\d+\s*", value):
                return cls(((0, int(value)),))
            ramp = _RAMP.fullmatch(value)
            if ramp is None:
                raise DataError(f"batch schedule {value!r} is not understood; allowed: {_FORMS}")
            start, end, steps = (int(ramp[i]) for i in (1, 2, 3))
            return cls(_ramp(start, end, steps, start if ramp[4] is None else int(ramp[4])))
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(((0, value),))
        if not isinstance(value, Sequence):
            raise DataError(f"batch schedule {value!r} is not understood; allowed: {_FORMS}")
        stages: list[tuple[int, int]] = []
        for pair in value:
            if not isinstance(pair, list | tuple) or [type(number) for number in pair] != [int, int]:
                raise DataError(f"{pair!r} in a batch schedule is not a pair of whole numbers [first_step, batch]")
            stages.append((pair[0], pair[1]))
        return cls(tuple(stages))

    def format(self) -> int | str | list[list[int]]:
        """The canonical value, which `parse` reads back: a number, else a ramp if it is one, else the stages."""
        if len(self.stages) == 1:
            return self.stages[0][1]
        (_, start), (_, second) = self.stages[:2]
        steps, end = self.stages[-1]
        increment = second - start
        is_even = increment > 0 and end - start == increment * (len(self.stages) - 1)
        if is_even and _ramp(start, end, steps, increment) == self.stages:
            return f"{start}..{end} over {steps}" + ("" if increment == start else f" by {increment}")
        return [list(stage) for stage in self.stages]

    def batch(self, step: int) -> int:
        """How many samples a step takes."""
        return self.stages[self._stage(step)][1]

    def position(self, step: int) -> int:
        """How many samples were taken before a step."""
        number = self._stage(step)
        first, batch = self.stages[number]
        return self._positions[number] + (step - first) * batch

    def step_at(self, position: int) -> int:
        """The step that takes the sample at a position."""
        if position < 0:
            raise ValueError(f"position {position} is before the first sample")
        number = bisect_right(self._positions, position) - 1
        first, batch = self.stages[number]
        return first + (position - self._positions[number]) // batch

    def sizes(self) -> tuple[int, ...]:
        """All batch sizes that occur, in growing order."""
        return tuple(sorted({batch for _, batch in self.stages}))

    def _stage(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"step {step} is before the first step, 0")
        return bisect_right(self.stages, step, key=lambda stage: stage[0]) - 1


def _ramp(start: int, end: int, steps: int, increment: int) -> tuple[tuple[int, int], ...]:
    """Stages that follow the straight line from `start` to `end` from below and reach `end` at step `steps`."""
    text = f"batch ramp {start}..{end} over {steps}"
    if start < 1 or end <= start:
        raise DataError(f"{text}: the batch must grow from at least 1; for a constant batch give one number")
    if increment < 1 or (end - start) % increment:
        raise DataError(
            f"{text}: increments of {increment} do not divide {end} - {start} = {end - start}; "
            f"choose another with 'by', such as 'by {_divisor(end - start, max(increment, 1))}'"
        )
    count = (end - start) // increment
    if steps < count:
        raise DataError(
            f"{text}: {count} increments of {increment} do not fit in {steps} steps; give more steps or a larger 'by'"
        )
    return tuple((-(-number * steps // count), start + number * increment) for number in range(count + 1))


def _divisor(span: int, near: int) -> int:
    """The divisor of a span that is nearest to a number."""
    return min((number for number in range(1, span + 1) if span % number == 0), key=lambda number: abs(number - near))
