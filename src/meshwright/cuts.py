"""How a length is cut into parts, and how layers are grouped: rules that several places must agree on.

Parts are as even as they go, the last ones being shorter or empty: the rule of `torch.chunk`, DTensors and FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence


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


SMALL_UNIT = 1 << 20
"""Parameters below which layers are gathered together with their neighbours: a collective of less is mostly waiting."""


def group_small(sizes: Sequence[int], total: int, least: int = SMALL_UNIT) -> list[list[int]]:
    """Layers of those sizes in groups of neighbours, each of at least that size where there is so much.

    Gives their indices; nothing where the whole model is small, which is one unit then.
    """
    if total < least:
        return []
    groups: list[list[int]] = []
    room = False
    for index in range(len(sizes)):
        if room:
            groups[-1].append(index)
        else:
            groups.append([index])
        room = sum(sizes[one] for one in groups[-1]) < least
    return groups


BUCKET_BYTES = 25 << 20
"""How many bytes of updated parameters are gathered at once."""


def buckets_of(sizes: Sequence[int], most: int = BUCKET_BYTES) -> list[list[int]]:
    """Neighbours in buckets of at most that size, larger ones alone; gives their indices."""
    buckets: list[list[int]] = []
    for index, size in enumerate(sizes):
        if buckets and sum(sizes[one] for one in buckets[-1]) + size <= most:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets
