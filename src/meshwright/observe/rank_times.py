"""What a rank's steps have taken in all, and what was done in vain: sums, however long the run. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.observe.curves import number

Line = Mapping[str, Any]

BESIDE = ("evaluate", "checkpoint", "hooks")
"""Parts of a rank's line that come after the update, and are no part of `step_s`."""


def fact(line: Line, name: str) -> float:
    """A number of a line, which is never less than nothing; 0 where it is none, or beyond all reason."""
    found = number(line.get(name))
    return found if found is not None and 0 <= found < 1e12 else 0.0


@dataclass
class Sums:
    """Seconds of some steps."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, parts: Mapping[str, float]) -> None:
        """Count a step, or several."""
        self.seconds += seconds
        for name, one in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + one

    @property
    def of_steps(self) -> float:
        """Without what comes after the update."""
        return self.seconds - sum(self.parts.get(name, 0.0) for name in BESIDE)


class Undone(NamedTuple):
    """Steps that a restart has undone: the run does them again."""

    steps: int
    seconds: float
    until: float
    """When the last of them ended."""


@dataclass
class RankTimes:
    """Of one rank."""

    all: Sums = field(default_factory=Sums)
    profiled: Sums = field(default_factory=Sums)
    undone: list[Undone] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Count a step line."""
        seconds, parts = fact(line, "seconds"), line.get("parts")
        if not seconds or not isinstance(parts, dict) or not parts:
            return
        held = {str(name): fact(parts, name) for name in parts}
        self.all.add(seconds, held)
        if line.get("profiled") is True:
            self.profiled.add(seconds, held)

    def undo(self, lines: Sequence[Line], steps: int) -> None:
        """Steps are done again: so many, and of the newest of them these lines."""
        seconds = [fact(line, "seconds") for line in lines]
        self.undone.append(
            Undone(steps, sum(seconds) / len(seconds) * steps, max(fact(line, "time") for line in lines))
        )
