"""Shows how far a preparation is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_SECONDS = 10.0


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Callable[[int, int, int], None]]:
    """A function for `prepare(progress=...)` that shows what it hears."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None, tokens=0)
        yield lambda read, total, tokens: bar.update(task, completed=read, total=total, tokens=tokens)


def _lines(stream: TextIO) -> Callable[[int, int, int], None]:
    start = last = time.monotonic()

    def show(read: int, total: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS and read < total:
            return
        last = now
        rate = read / (now - start) / 1e6 if now > start else 0.0
        print(f"{read:,} of {total:,} bytes, {tokens:,} tokens, {rate:.1f} MB/s", file=stream, flush=True)

    return show
