"""Lines of log files, as they are written. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path


def lines_of(files: Sequence[Path], goes_on: Callable[[], bool]) -> Iterator[str]:
    """All lines of the files, and those that come while it goes on; with several, each after its file's name."""
    with ExitStack() as stack:
        opened: dict[Path, object] = {}
        parts: dict[Path, str] = {}
        while True:
            last = not goes_on()
            for file in files:
                if file not in opened and file.exists():
                    opened[file] = stack.enter_context(file.open(encoding="utf-8", errors="replace"))
                    parts[file] = ""
            for file, stream in opened.items():
                *whole, parts[file] = (parts[file] + stream.read()).split("\n")  # type: ignore[attr-defined]
                yield from (_named(file, line, files) for line in whole)
            if last:
                break
            time.sleep(0.3)
        yield from (_named(file, part, files) for file, part in parts.items() if part)


def _named(file: Path, line: str, files: Sequence[Path]) -> str:
    return line if len(files) == 1 else f"{file.stem}: {line}"
