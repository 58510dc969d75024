"""What the ranks of a machine leave for the one of them that serves metrics: a small file in memory each.

A rank writes its numbers there after a step, which takes a microsecond and waits for nobody; whoever serves looks when
somebody asks. Numbers of one look may be of two steps: each of them is whole.
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

from meshwright.pulse import PHASES, Pulse

MEMORY = ("rss", "allocated", "reserved", "peak")
"""Kinds of memory that are told."""

_WHO = struct.Struct("<qq")
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
        # Never into one of an earlier process, which somebody may still look at.
        with suppress(FileNotFoundError):
            self._path.unlink()
        with self._path.open("xb+") as file:
            file.write(_WHO.pack(os.getpid(), pulse.generation) + bytes(_FIGURES.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _SIZE)
            self._made = os.fstat(file.fileno()).st_ino

    def put(self, memory: Mapping[str, int]) -> None:
        """Tell how much time the phases have taken so far, and this memory."""
        kinds = [memory.get(kind, 0) for kind in MEMORY]
        _FIGURES.pack_into(self._memory, _WHO.size, *self._pulse.spent_until(time.monotonic()), *kinds)

    def close(self) -> None:
        """This rank has ended."""
        with suppress(OSError):
            # A rank that took this one's place has left its own.
            if self._path.stat().st_ino == self._made:
                self._path.unlink()
            # Works for the last of them.
            self._path.parent.rmdir()


def board_folder(run_id: str, run: Path) -> Path:
    """Where the ranks of this run on this machine meet: a folder in memory that only this user can enter."""
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())
    # A copy of a run folder has the same id, and may be trained at the same time.
    folder = root / f"meshwright-{os.getuid()}-{run_id}-{zlib.crc32(os.fsencode(run.resolve())):08x}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


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
        pid, started = _WHO.unpack_from(content)
        numbers = _FIGURES.unpack_from(content, _WHO.size)
        os.kill(pid, 0)
    except (OSError, struct.error):
        # Gone, or not there yet.
        return None
    if started != generation:
        return None
    phases = {name: seconds for name, seconds in zip(PHASES, numbers, strict=False) if seconds}
    memory = {kind: size for kind, size in zip(MEMORY, numbers[len(PHASES) :], strict=True) if size}
    return Figures(phases, memory) if phases else None
