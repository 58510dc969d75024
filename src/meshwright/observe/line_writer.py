"""Lines for files that grow, written behind the back of the training: nothing here waits for a disk, or ends a run.

A line may be given as what makes it. Then the thread that writes makes it, many in a row, which is cheaper than one
after each step: computing has thrown all else out of the caches by then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PERIOD_S = 0.5
"""Seconds between two writes: the most that a process that is killed takes with it."""

MOST_LINES = 20_000
"""Lines that wait for a disk; of more than these, the oldest are dropped."""

PATIENCE_S = 5.0
"""Seconds that the end of a run waits for the last lines."""


Line = bytes | Callable[[], bytes]
"""A line without its end, or what gives it."""


class LineWriter:
    """Appends lines to files from a thread of its own; the folder of the files is made when the first line is there."""

    def __init__(self, may_write: Callable[[], None]) -> None:
        """`may_write` raises where this process has no business in those files any more."""
        self._may_write = may_write
        self._lines: deque[tuple[Path, Line]] = deque()
        self._wake, self._pause = threading.Event(), threading.Event()
        self._ending = False
        self._told = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.cpu_s = 0.0
        """Seconds of a core that writing has taken; the thread competes with the training for them."""

    def put(self, path: Path, line: Line) -> None:
        """Write this line to that file soon."""
        if self._ending:
            return
        if len(self._lines) >= MOST_LINES:
            self._lines.popleft()
            self.dropped += 1
        self._lines.append((path, line))
        if self._thread is None:
            # Daemonic: a disk that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="meshwright-lines", daemon=True)
            self._thread.start()
        # Asking is cheaper than waking, and lines that come while the thread pauses are written with the others.
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write what is left, unless the disk takes too long."""
        self._ending = True
        self._wake.set()
        self._pause.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait()
            self._wake.clear()
            self._write()
            self._pause.wait(PERIOD_S)
        self._write()

    def _write(self) -> None:
        began = time.thread_time()
        taken: dict[Path, list[Line]] = {}
        with suppress(IndexError):
            while True:
                path, line = self._lines.popleft()
                taken.setdefault(path, []).append(line)
        if taken and self._is_allowed():
            for path, lines in taken.items():
                try:
                    append(path, b"".join(_made(line) + b"\n" for line in lines))
                except OSError as error:
                    self._tell(f"{path} cannot be written: {error.strerror or error}; what is lost there is lost")
                except Exception as error:
                    self._tell(f"lines of {path} cannot be made: {error!r}; what is lost there is lost")
        self.cpu_s += time.thread_time() - began

    def _is_allowed(self) -> bool:
        try:
            self._may_write()
        except Exception:
            # Others train here now; whoever does not only watch says so.
            return False
        return True

    def _tell(self, text: str) -> None:
        if self._told:
            return
        self._told = True
        with suppress(OSError, ValueError):
            print(f"meshwright: {text}, the run goes on", file=sys.stderr, flush=True)


def _made(line: Line) -> bytes:
    return line if isinstance(line, bytes) else line()


def append(path: Path, data: bytes) -> None:
    """Append whole lines to a file; where a crash or a full disk has cut the last one short, they begin a new one."""
    # Only a folder of the run folder: where that is not there, this machine does not see it.
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            data = data if file.read(1) == b"\n" else b"\n" + data
        file.write(data)
