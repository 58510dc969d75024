"""Text from elsewhere that is safe to show: nothing in it does something to a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "", instead: str = "?") -> str:
    """With another character for each that does not print, but for those to keep."""
    return "".join(letter if letter.isprintable() or letter in keep else instead for letter in text)
