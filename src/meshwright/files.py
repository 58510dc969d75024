"""Writes that survive a crash: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    flush(temporary)
    temporary.rename(path)
    flush(path.parent)


def replace_text(path: Path, text: str) -> None:
    """As `write_atomically`, for what readers must see whole but need not outlive a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Where what was measured on this machine is kept for later plans."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "meshwright"
