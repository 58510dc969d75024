"""How a length is cut into parts: as evenly as it goes, the last parts being shorter or empty.

The one rule of `torch.chunk`, DTensors and FSDP; here for those who must agree with them.
"""

from __future__ import annotations


def longest_part(length: int, parts: int) -> int:
    """The length of the first part, which is the longest."""
    return -(-length // parts)


def part(length: int, parts: int, index: int) -> slice:
    """Where the part of that index lies."""
    longest = longest_part(length, parts)
    return slice(min(index * longest, length), min((index + 1) * longest, length))


def part_length(length: int, parts: int, index: int) -> int:
    """How long the part of that index is."""
    where = part(length, parts, index)
    return where.stop - where.start
