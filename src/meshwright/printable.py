"""Text from elsewhere that is safe to show: nothing in it does something to a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """With a question mark for each character that does not print, but for those to keep."""
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)
