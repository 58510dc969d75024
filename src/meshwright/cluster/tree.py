"""A folder that looks like a machine's root: files of one value, folders as lists, links as names.

The folder may be anybody's: what is read of it is safe to show, and its numbers are of a size to reckon with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from meshwright.printable import printable

_MOST_DIGITS = 18


@dataclass(frozen=True)
class Tree:
    """Reads below a root; what is not there, or refuses to be read, is None or empty."""

    root: Path

    def text(self, path: str) -> str | None:
        """A file's content without the white space around it."""
        try:
            text = (self.root / path).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None
        return printable(text.strip("\0 \t\r\n"), keep="\n\t")

    def data(self, path: str) -> bytes:
        """A file's bytes, as far as we may read them."""
        try:
            return (self.root / path).read_bytes()
        except OSError:
            return b""

    def number(self, path: str, base: int = 10) -> int | None:
        """A file with one whole number."""
        try:
            text = self.text(path) or ""
            return int(text, base) if len(text) <= _MOST_DIGITS else None
        except ValueError:
            return None

    def numa(self, device: str) -> int | None:
        """The NUMA node of a device; None where there is none, which the kernel writes as -1."""
        number = self.number(f"{device}/numa_node")
        return number if number is not None and number >= 0 else None

    def names(self, path: str) -> list[str]:
        """What is in a folder, sorted; no names that cannot be shown."""
        try:
            return sorted(filter(str.isprintable, os.listdir(self.root / path)))
        except OSError:
            return []

    def has(self, path: str) -> bool:
        """Whether something is there."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def real(self, path: str) -> Path:
        """Where links lead."""
        return Path(printable(os.path.realpath(self.root / path)))

    def link_name(self, path: str) -> str:
        """The last name of where a link leads; empty where there is none."""
        return self.real(path).name if self.has(path) else ""
