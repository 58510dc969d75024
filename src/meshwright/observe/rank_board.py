"""What the ranks of a machine leave for the one of them that serves metrics: a small file in memory each.

A rank writes its numbers there after a step, which takes a microsecond and waits for nobody; whoever serves looks when
somebody asks. Numbers of one look may be of two steps: each of them is whole. What ranks leave that were killed counts
no more, and goes when the next one of this user begins or ends.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from meshwright.elastic.processes import process_state
from meshwright.pulse import PHASES, Pulse

MEMORY = ("rss", "allocated", "reserved", "peak")
"""Kinds of memory that are told."""

_WHO = struct.Struct("<qqq")
"""The process, when it was started, and with which others."""
_FIGURES = struct.Struct(f"<{len(PHASES)}d{len(MEMORY)}q")
_SIZE = _WHO.size + _FIGURES.size


class Figures(NamedTuple):
    """What a rank has told."""

    phases: dict[str, float]
    """Seconds in each phase that it has been in, since it started."""
    memory: dict[str, int]
    """Bytes by kind."""


class Board:
    """A rank's own side."""

    def __init__(self, folder: Path, pulse: Pulse) -> None:
        self._path, self._pulse = folder / str(pulse.rank), pulse
        who = _WHO.pack(os.getpid(), process_state(os.getpid()).started, pulse.generation)
        # Never into one of an earlier process, which somebody may still look at.
        self._path.unlink(missing_ok=True)
        # Whoever leaves takes the folder along if it is empty.
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with self._path.open("xb+") as file:
                file.write(who + bytes(_FIGURES.size))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _SIZE)
                self._made = os.fstat(file.fileno()).st_ino
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    def put(self, memory: Mapping[str, int]) -> None:
        """Tell how much time the phases have taken so far, and this memory."""
        kinds = [memory.get(kind, 0) for kind in MEMORY]
        # Packed beside and copied: packed in place, it would be zeros for a moment, and somebody may look.
        self._memory[_WHO.size :] = _FIGURES.pack(*self._pulse.spent_until(time.monotonic()), *kinds)

    def close(self) -> None:
        """This rank has ended."""
        with suppress(OSError):
            # A rank that took this one's place has left its own.
            if self._path.stat().st_ino == self._made:
                self._path.unlink()
        leave(self._path.parent)


def board_folder(run_id: str, run: Path) -> Path:
    """Where the ranks of this run on this machine meet: a folder in memory that only this user can enter."""
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())
    ours = f"meshwright-{os.getuid()}-{_numbering()}"
    # A copy of a run folder has the same id, and may be trained at the same time.
    folder = root / f"{ours}-{run_id}-{zlib.crc32(os.fsencode(run.resolve())):08x}"
    for other in root.glob(f"{ours}-*"):
        _remove_boards_of_the_dead(other)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _numbering() -> int:
    """What tells containers apart that share memory but number their processes by themselves."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def leave(folder: Path) -> None:
    """Whoever looks there, or has left something, has ended: the folder goes with the last one that lives."""
    _remove_boards_of_the_dead(folder)
    with suppress(OSError):
        folder.rmdir()


def _remove_boards_of_the_dead(folder: Path) -> None:
    """Remove what ranks have left that were killed, and a folder that held nothing else."""
    with suppress(OSError):
        dead = [path for path in folder.iterdir() if path.name.isdecimal() and _is_of_the_dead(path)]
        for path in dead:
            path.unlink(missing_ok=True)
        if dead:
            folder.rmdir()


def _is_of_the_dead(path: Path) -> bool:
    try:
        pid, started, _ = _WHO.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        # One that is being made.
        return False
    return not _lives(pid, started)


def _lives(pid: int, started: int) -> bool:
    """Whether that very process does, and not a later one of its number."""
    found = process_state(pid)
    return not found.ended and found.started == started


def read_boards(folder: Path, generation: int) -> dict[int, Figures]:
    """What the ranks of this machine have told that were started together and still live, by rank."""
    found = {}
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.isdecimal() and (figures := _read(path, generation)) is not None:
                found[int(path.name)] = figures
    return found


def _read(path: Path, generation: int) -> Figures | None:
    try:
        content = path.read_bytes()
        pid, started, started_with = _WHO.unpack_from(content)
        numbers = _FIGURES.unpack_from(content, _WHO.size)
    except (OSError, struct.error):
        # Gone, or not there yet.
        return None
    if started_with != generation or not _lives(pid, started):
        return None
    phases = {name: seconds for name, seconds in zip(PHASES, numbers, strict=False) if seconds}
    memory = {kind: size for kind, size in zip(MEMORY, numbers[len(PHASES) :], strict=True) if size}
    return Figures(phases, memory) if phases else None
