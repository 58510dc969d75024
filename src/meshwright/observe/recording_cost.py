"""What recording costs a run: calls of the recorder, and what a profiled step takes longer than others."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from meshwright.observe.host_phases import Timed
from meshwright.observe.rank_lines import PARTS

SUM_EVERY = 50
"""Steps between two lines on what recording costs, where none is profiled in between."""

TELL_AFTER = 5
"""Steps after the first profiled one until its cost is told: those with which it is compared."""

_RARE = ("evaluate", *[phase for phase, part in PARTS.items() if part == "checkpoint"])


class Cost:
    """What recording costs."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.inside = 0.0
        """Seconds in calls of the recorder, and of its thread, since the last line."""
        self._calls: list[float] = []
        """Those of the calls of each step."""
        self._new: list[tuple[Timed, bool]] = []
        """Steps since the last line, and whether they were profiled; looked at when somebody asks."""
        self._counted = 0
        self._seconds = 0.0
        """Of those that were looked at."""
        self._usual: deque[float] = deque(maxlen=SUM_EVERY)
        """Seconds of steps that were not profiled."""
        self._profiled: float | None = None
        """Seconds of the last step that was."""
        self._is_warm = False
        self._since = 0
        """Steps since the first profiled one, with it."""

    @property
    def steps(self) -> int:
        """Steps since the last line."""
        return self._counted + len(self._new)

    def add_calls(self, seconds: float) -> None:
        """What the calls in a step have taken."""
        self.inside += seconds
        self._calls.append(seconds)

    def add(self, timed: Timed, profiled: bool) -> bool:
        """A step more; gives whether it is time for a line."""
        self._new.append((timed, profiled))
        self._since += self._since > 0 or profiled
        return profiled or self.steps >= SUM_EVERY

    def _look(self) -> None:
        """Add up what is new."""
        for timed, profiled in self._new:
            seconds, phases = timed.seconds, timed.phases
            self._seconds += seconds
            # What happens in some steps only would be taken for a profile's cost, or hide it.
            usual = seconds - sum(phases.get(phase, 0.0) for phase in _RARE)
            if profiled:
                self._profiled = usual
            elif self._is_warm:
                self._usual.append(usual)
            self._is_warm = True
        self._counted += len(self._new)
        self._new.clear()

    @property
    def beyond(self) -> float | None:
        """Seconds that the last profiled step took more than others."""
        self._look()
        if self._profiled is None or len(self._usual) < 3:
            return None
        return max(0.0, self._profiled - statistics.median(self._usual))

    @property
    def is_to_tell(self) -> bool:
        """Whether a person is to be told now what profiles cost; once."""
        return self._since == TELL_AFTER + 1 and self.beyond is not None

    def sentence(self) -> str:
        """What profiles cost."""
        cost, usual = self.beyond or 0.0, statistics.median(self._usual)
        share = cost / (cost + self._every * usual)
        return f"watch  profiling 1 step in {self._every} costs {share:.2%} of the time"

    def line(self, step: int, was_profiled: bool = False) -> dict[str, Any]:
        """What recording has cost since the last line; of a step that was profiled also what that has."""
        self._look()
        share = self.inside / self._seconds if self._seconds else 0.0
        found = {"kind": "recorder", "step": step, "inside_s": round(self.inside, 7), "share": round(share, 7)}
        if self._calls:
            # A rank that waits for a core waits there as well: the sum tells of that, the middle of recording alone.
            beside = self.inside - sum(self._calls)
            found["usual_s"] = round(statistics.median(self._calls) + beside / len(self._calls), 7)
        if was_profiled and self.beyond is not None:
            found["profiler_s"] = round(self.beyond, 7)
        self.inside, self._calls, self._seconds, self._counted = 0.0, [], 0.0, 0
        return found
