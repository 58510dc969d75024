"""What a rank is doing right now, for whoever watches it from outside: a small file that both map into memory.

A rank says which phase of which step it enters; that costs less than a microsecond and never blocks. The file keeps
the last word of a rank that is stopped, stuck or gone. The same places are where tests inject faults.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.faults import VARIABLE, Fault, parse_faults, play

PHASES = (
    "start",
    "restore",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "evaluate",
    "stage",
    "write",
    "commit",
    "retention",
    "hooks",
    "end",
)
"""Where a rank may be. stage, write, commit and retention are the parts of a save."""

GENERATION = "MESHWRIGHT_GENERATION"
"""The variable that counts how often the ranks were started."""

_LAYOUT = struct.Struct("<qqqqd")


@dataclass(frozen=True)
class Beat:
    """What a rank last said."""

    pid: int
    step: int
    phase: str
    entered: int
    """How many phases it has entered: it is alive as long as this grows."""
    since: float
    """When it entered this one, by the machine's monotonic clock."""


class Pulse:
    """A rank's own side: `enter` says what it does now."""

    def __init__(self, rank: int = 0, path: Path | None = None) -> None:
        """Without a path nobody watches."""
        self.rank = rank
        self.step = 0
        self.phase = PHASES[0]
        self.generation = int(os.environ.get(GENERATION, "0"))
        self._entered = 0
        self._faults: list[Fault] = parse_faults(os.environ.get(VARIABLE, ""))
        self._memory: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_LAYOUT.size))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def enter(self, phase: str) -> str | None:
        """The rank begins this phase. Gives a fault's kind that the caller has to play; None unless a test wants it."""
        self.phase = phase
        if self._memory is not None:
            self._entered += 1
            number = PHASES.index(phase)
            _LAYOUT.pack_into(self._memory, 0, os.getpid(), self.step, number, self._entered, time.monotonic())
        return self.fault(phase) if self._faults else None

    def fault(self, place: str) -> str | None:
        """A place that is no phase of its own where a test may want a fault."""
        for fault in self._faults:
            if fault.plays(place, self.rank, self.step, self.generation):
                fault.times -= 1
                play(fault.kind)
                return fault.kind
        return None


def read_pulse(path: Path) -> Beat | None:
    """What a rank last said; None before its first word."""
    try:
        pid, step, phase, entered, since = _LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Beat(pid, step, PHASES[phase], entered, since) if entered else None
