"""Computation efficiency: computing as a share of computing and exposed communication, as profiled steps tell it.

Waiting for another stage of a pipeline and idle time are not counted. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from meshwright.observe.curves import number
from meshwright.observe.rank_files import RankRecord, numbers_of

GOAL = 0.8
"""The share that a run should reach: below it, communication that nothing hides costs a fifth of the time or more."""


@dataclass(frozen=True)
class Efficiency:
    """Seconds of profiled steps, one a rank."""

    compute: float
    exposed: float

    @property
    def share(self) -> float:
        """What of them was computing."""
        return self.compute / (self.compute + self.exposed)


def efficiency(records: Iterable[RankRecord]) -> Efficiency | None:
    """Of the newest profiled steps of some ranks together; None where none has one."""
    compute = exposed = 0.0
    for record in records:
        line = record.profiled or {}
        compute += max(0.0, number(line.get("compute")) or 0.0)
        exposed += max(0.0, numbers_of(line.get("communication")).get("exposed", 0.0))
    return Efficiency(compute, exposed) if compute > 0 else None


def hidden_and_idle(records: Iterable[RankRecord]) -> tuple[float, float] | None:
    """Overlapped communication and idle time of the newest profiled steps, as shares of them; None without any."""
    whole = overlapped = idle = 0.0
    for record in records:
        line = record.profiled or {}
        of_line, communication = numbers_of(line), numbers_of(line.get("communication"))
        # The step itself, from its data to the update, is what these four make up.
        whole += sum(max(0.0, of_line.get(name, 0.0)) for name in ("compute", "bubble", "idle"))
        whole += max(0.0, communication.get("exposed", 0.0))
        overlapped += max(0.0, communication.get("overlapped", 0.0))
        idle += max(0.0, of_line.get("idle", 0.0))
    return (overlapped / whole, idle / whole) if 0 < whole < inf else None
