"""What a rank is doing right now, for whoever watches it from outside: a small file that both map into memory.

A rank says which phase of which step it enters; that costs about a microsecond and never blocks. The file keeps
the last word of a rank that is stopped, stuck or gone. The seconds of each phase are added up for who records the
steps, whether or not somebody watches from outside. The same places are where tests inject faults.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.faults import VARIABLE, Fault, note, parse_faults, play

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

NOBODY = -1
"""The rank that one waits for who waits for none."""

_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_NOW = struct.Struct("<qqqqdq")
# Then of each phase how often it has ended and how long the longest of them took.
_ENDED = struct.Struct("<qd")
_SIZE = _NOW.size + _ENDED.size * len(PHASES)
_WAITS_FOR = struct.Struct("<q")
_WAITS_AT = _NOW.size - _WAITS_FOR.size


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
    waits_for: int = NOBODY
    """The rank whose transfer it waits for, if that is what it does."""
    ended: dict[str, int] = field(default_factory=dict)
    """How often each phase has ended."""
    longest: dict[str, float] = field(default_factory=dict)
    """How many seconds the longest of them took."""


class Pulse:
    """A rank's own side: `enter` says what it does now."""

    def __init__(self, rank: int = 0, path: Path | None = None) -> None:
        """Without a path nobody watches."""
        self.rank = rank
        self.step = 0
        self.phase = PHASES[0]
        self.generation = int(os.environ.get(GENERATION, "0"))
        self._phase = 0
        self._entered = 0
        self._since = 0.0
        self._ended = [0] * len(PHASES)
        self._longest = [0.0] * len(PHASES)
        self._spent = [0.0] * len(PHASES)
        self.listeners: list[Callable[[str, float], None]] = []
        """Called with each phase that begins, and the monotonic time."""
        self.waits: list[tuple[float, float]] | None = None
        """While somebody wants to know: from when to when this rank waited for what another sends or takes."""
        self._faults: list[Fault] = parse_faults(os.environ.get(VARIABLE, ""))
        self._memory: mmap.mmap | None = None
        self._thread = threading.get_ident()
        if path is not None:
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE)

    def enter(self, phase: str) -> str | None:
        """The rank begins this phase. Gives a fault's kind that the caller has to play; None unless a test wants it.

        Only the thread that made the pulse speaks for the rank: what others do meanwhile does not change its phase.
        """
        if threading.get_ident() == self._thread:
            self._begin(_NUMBER[phase])
        return self.fault(phase) if self._faults else None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The context of a phase inside another one, which goes on afterwards."""
        outer = self._phase
        self.enter(phase)
        yield
        if self._entered and threading.get_ident() == self._thread:
            self._begin(outer)

    @contextmanager
    def waiting_for(self, rank: int) -> Iterator[None]:
        """The context in which this rank waits for what another one sends or takes."""
        waits = self.waits
        began = time.monotonic() if waits is not None else 0.0
        if self._memory is not None:
            self._memory[_WAITS_AT : _NOW.size] = _WAITS_FOR.pack(rank)
        yield
        if self._memory is not None:
            self._memory[_WAITS_AT : _NOW.size] = _WAITS_FOR.pack(NOBODY)
        if waits is not None:
            waits.append((began, time.monotonic()))

    def _begin(self, phase: int) -> None:
        now, memory = time.monotonic(), self._memory
        if self._entered:
            ending = self._phase
            self._ended[ending] += 1
            seconds = now - self._since
            self._spent[ending] += seconds
            if seconds > self._longest[ending]:
                self._longest[ending] = seconds
            if memory is not None:
                place = _NOW.size + _ENDED.size * ending
                memory[place : place + _ENDED.size] = _ENDED.pack(self._ended[ending], self._longest[ending])
        self._phase, self._since, self.phase = phase, now, PHASES[phase]
        self._entered += 1
        if memory is not None:
            # Packed beside and copied: packed in place, it would be zeros for a moment, and somebody may look.
            memory[: _NOW.size] = _NOW.pack(os.getpid(), self.step, phase, self._entered, now, NOBODY)
        for listener in self.listeners:
            listener(PHASES[phase], now)

    def spent(self) -> dict[str, float]:
        """Seconds spent so far in each phase that this rank has been in; may be asked from any thread."""
        return {name: seconds for name, seconds in zip(PHASES, self._spent, strict=True) if seconds}

    def spent_until(self, now: float) -> list[float]:
        """The seconds of each of PHASES until this monotonic time, the one in hand included."""
        found = self._spent.copy()
        if self._entered:
            found[self._phase] += now - self._since
        return found

    def fault(self, place: str, step: int | None = None) -> str | None:
        """A place that is no phase of its own where a test may want a fault; of this step, unless it is another's."""
        for fault in self._faults:
            if fault.plays(place, self.rank, self.step if step is None else step, self.generation):
                fault.times -= 1
                note(self.rank, self.step, fault)
                play(fault.kind)
                return fault.kind
        return None


def read_pulse(path: Path) -> Beat | None:
    """What a rank last said; None before its first word."""
    try:
        content = path.read_bytes()
        pid, step, phase, entered, since, waits_for = _NOW.unpack_from(content)
        ended = list(_ENDED.iter_unpack(content[_NOW.size :]))
    except (OSError, struct.error):
        return None
    if not entered:
        return None
    counts = {name: count for name, (count, _) in zip(PHASES, ended, strict=True)}
    longest = {name: seconds for name, (_, seconds) in zip(PHASES, ended, strict=True)}
    return Beat(pid, step, PHASES[phase], entered, since, waits_for, counts, longest)
