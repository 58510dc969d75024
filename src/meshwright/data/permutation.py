"""A shuffle of [0, n) that is computed, not stored: any element in constant time and no memory, for n up to 2^63.

A number is split into two digits, i = left * columns + right, on the smallest near-square grid that holds n. Rounds
of a Feistel network add to each digit, modulo its range, a hash of the other and the key, which can be undone and so
is a bijection of the grid. A result outside [0, n) is put through again until it falls inside (cycle walking);
the grid exceeds n by less than one row, so that is rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import overload

import numpy as np
import xxhash
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

ROUNDS = 4  # each moves both digits; fewer show in the statistics of small n
LARGEST = 1 << 63
_STEP = np.uint64(0x9E3779B97F4A7C15)


def mix(numbers: Numbers) -> Numbers:
    """A hash of 64-bit numbers in which every bit depends on every bit (the finaliser of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def derive_key(*parts: object) -> int:
    """A 64-bit key from anything that has a text, such as a purpose and a seed."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def numbered_keys(key: int, numbers: Numbers) -> Numbers:
    """A key of its own for each number."""
    return mix(np.uint64(key) + mix(numbers + _STEP))


def permute(indices: Numbers, size: int, keys: Numbers) -> Numbers:
    """Where each index goes in the shuffle of [0, size) with its key; `keys` is one key or one for each index."""
    if not 1 <= size <= LARGEST:
        raise ValueError(f"a permutation of {size} numbers; the size must be from 1 to 2^63")
    if indices.size and int(indices.max()) >= size:
        raise IndexError(f"index {int(indices.max())} of a permutation of {size} numbers")
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    result = _network(indices, np.uint64(rows), np.uint64(columns), keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        again = _network(
            result[outside], np.uint64(rows), np.uint64(columns), keys if keys.size == 1 else keys[outside]
        )
        result[outside] = again
        outside = outside[again >= np.uint64(size)]
    return result


def _network(numbers: Numbers, rows: np.uint64, columns: np.uint64, keys: Numbers) -> Numbers:
    left, right = np.divmod(numbers, columns)
    keys = mix(keys + _STEP)  # so that keys that are close to each other give unrelated hashes
    for _ in range(ROUNDS):
        # Half of the hash's range leaves room to add a digit without wrapping around, which could not be undone.
        keys = keys + _STEP
        left = (left + (mix(right ^ keys) >> np.uint64(1))) % rows
        keys = keys + _STEP
        right = (right + (mix(left ^ keys) >> np.uint64(1))) % columns
    return left * columns + right


@dataclass(frozen=True)
class Permutation:
    """The shuffle of [0, size) that belongs to a key."""

    size: int
    key: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST:
            raise ValueError(f"a permutation of {self.size} numbers; the size must be from 1 to 2^63")

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Numbers) -> Numbers: ...
    def __call__(self, index: int | Numbers) -> int | Numbers:
        """Where an index, or each of an array of indices, goes."""
        keys = np.array([self.key % (1 << 64)], dtype=np.uint64)
        if isinstance(index, np.ndarray):
            return permute(index.astype(np.uint64, copy=False).ravel(), self.size, keys).reshape(index.shape)
        return int(permute(np.array([index], dtype=np.uint64), self.size, keys)[0])
