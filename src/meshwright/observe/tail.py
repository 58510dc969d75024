"""New lines of a .jsonl file that somebody else writes: only what was added is read, and only whole lines count.

A file may be missing, cut short in its last line, replaced by another (records of steps that are computed again are
rewritten) or shorter than before; then it is read from its start, and the reader is told to forget what it had.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20
LONGEST_LINE = 8 << 20
"""Bytes of a line; what has no end after so many is no record."""
MEMORY = 64
"""Bytes before the place that was read to, by which the same file is known again."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Added:
    """What a file has that it had not before."""

    lines: list[Line] = field(default_factory=list)
    anew: bool = False
    """Whether these are all lines of a file that is not the one read before."""


class Tail:
    """Reads a file of JSON lines again and again; objects only, and lines that cannot be read are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._before = b""
        self._seen: tuple[int, int] | None = None

    def read(self) -> Added:
        """The lines that were added since the last call."""
        try:
            stat = os.stat(self.path)
            if self._identity == (stat.st_dev, stat.st_ino) and self._seen == (stat.st_size, stat.st_mtime_ns):
                return Added()
            with open(self.path, "rb") as file:
                return self._read(file)
        except OSError:
            # Not there, or not now: between two renames, or on a disk that comes back.
            return self._forget()

    def _forget(self) -> Added:
        had = self._identity is not None
        self._identity, self._offset, self._before, self._seen = None, 0, b"", None
        return Added(anew=had)

    def _read(self, file: BinaryIO) -> Added:
        stat = os.fstat(file.fileno())
        anew = False
        if self._identity != (stat.st_dev, stat.st_ino) or not self._is_continued(file, stat.st_size):
            anew = self._forget().anew
            self._identity = (stat.st_dev, stat.st_ino)
        self._seen = (stat.st_size, stat.st_mtime_ns)
        file.seek(self._offset)
        lines, rest = [], b""
        while chunk := file.read(CHUNK):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._advance(line + b"\n")
                if (found := _parse(line)) is not None:
                    lines.append(found)
            if len(rest) > LONGEST_LINE:
                self._advance(rest)
                rest = b""
        return Added(lines, anew)

    def _advance(self, data: bytes) -> None:
        self._offset += len(data)
        self._before = (self._before + data[-MEMORY:])[-MEMORY:]

    def _is_continued(self, file: BinaryIO, size: int) -> bool:
        """Whether what was read is still there: a file may be emptied and written anew under the same name."""
        if size < self._offset:
            return False
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before


def _parse(line: bytes) -> Line | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_json(path: Path) -> Line:
    """A file with one JSON object; empty where it cannot be read."""
    try:
        return _parse(path.read_bytes()) or {}
    except OSError:
        return {}
