"""The folder of a packed corpus while it is being made: whose it is, what an earlier run left, how it is cleared.

The folder is ours when it holds `preparing.json` (the plan, while work is going on) or `index.json` (written last).
A folder that holds anything else is never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.data.pack import TEMPORARY, replace_file
from meshwright.data.shards import FORMAT, INDEX, REMAINS, TOKENIZER
from meshwright.errors import DataError

LOCK_SECONDS = 5.0
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
SHARD_FILES = ("shard-*.bin", "shard-*.documents", "shard-*.json")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Make the folder if it is not there and hold it for this process alone; one that is still empty goes again."""
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The workers of a run that was just killed hold the lock until they are gone, a moment later.
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise DataError(f"another process is preparing {folder}; wait for it, or choose another folder")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)
        if created:
            with suppress(OSError):
                folder.rmdir()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn("the file system has no locks; let only one process prepare this folder", stacklevel=2)
    return True


def earlier_plan(folder: Path) -> dict[str, Any] | None:
    """The plan by which the folder was prepared or begun; None for an empty folder, a DataError for a foreign one."""
    for name in (REMAINS, INDEX):
        with suppress(OSError, ValueError, LookupError, TypeError):
            content = json.loads((folder / name).read_bytes())
            if content["format"] == FORMAT:
                return dict(content["plan"])
    strangers = sorted(path.name for path in folder.iterdir())
    if strangers:
        raise DataError(
            f"{folder} is not empty and was not made by `meshwright data prepare` (it holds "
            f"{', '.join(strangers[:3])}); nothing was changed. Choose a folder that is new or empty"
        )
    return None


def begin(folder: Path, plan: Mapping[str, Any], keep: bool) -> None:
    """Mark the folder as under way; without `keep`, remove what was made before."""
    # First the mark, then the index: a folder that is ours never stops being so, nor does a half one look whole.
    replace_file(folder / REMAINS, json.dumps({"format": FORMAT, "plan": dict(plan)}, indent=1) + "\n")
    (folder / INDEX).unlink(missing_ok=True)
    if not keep:
        _remove_shards(folder)
    remove_temporary(folder)


def finish(folder: Path, index: str) -> None:
    """Write the index, which makes the corpus whole, and remove what only an unfinished one needs."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
        replace_file(folder / INDEX, index)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for note in folder.glob("shard-*.json"):
        note.unlink()
    (folder / REMAINS).unlink()


def abandon(folder: Path) -> None:
    """Remove unfinished files; where no shard is finished, everything that was begun."""
    remove_temporary(folder)
    if not any(folder.glob("shard-*.bin")):
        _remove_shards(folder)
        (folder / REMAINS).unlink(missing_ok=True)


def _remove_shards(folder: Path) -> None:
    for pattern in SHARD_FILES:
        for path in folder.glob(pattern):
            path.unlink()
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)


def shard_bytes(folder: Path) -> int:
    """How much space removing the shards of a folder would free."""
    return sum(path.stat().st_size for pattern in SHARD_FILES for path in folder.glob(pattern))


def remove_temporary(folder: Path) -> None:
    """Remove files that were being written when a run ended."""
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink()
