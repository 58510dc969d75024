"""One launch of a run folder at a time: from the look at what was launched before to the record of this. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.errors import UserError
from meshwright.launch.target import unwritable
from meshwright.lock import Lock

LOCK = "launching.lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a launch folder; folders that were made for it stay only if something was left there."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        lock = _take(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        yield
    finally:
        # While it is held: whoever opens it now takes another.
        (folder / LOCK).unlink(missing_ok=True)
        lock.close()
        for place in made:
            with suppress(OSError):  # Something lies there.
                place.rmdir()


def _take(folder: Path) -> Lock:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(folder / LOCK, os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except FileNotFoundError:
            continue  # One that was refused took its folder with it.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"another `meshwright launch` of this run is under way ({folder / LOCK}); wait for it, or choose "
                "another run.dir"
            ) from None
        if lock.is_current:
            return lock
        lock.close()
