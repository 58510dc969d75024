"""Read the samples at any places of a sampler; where one cannot be read, name it, or go on without it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sampler import Sampler
from meshwright.data.skips import runs
from meshwright.errors import DataError


class BadSample(DataError):
    """A sample cannot be read, or holds what the model cannot take."""

    def __init__(self, place: int, error: Exception) -> None:
        super().__init__(f"sample {place} cannot be used: {error}")
        self.place = place


def read_samples(
    sampler: Sampler, places: NDArray[np.int64], skip_bad: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens at places (micro-steps, samples), and a one for each that was bad and is not to count."""
    tokens = np.zeros((*places.shape, sampler.sequence_length + 1), dtype=np.int64)
    bad = np.zeros(places.shape, dtype=np.int64)
    for row, held, ignored in zip(places, tokens, bad, strict=True):
        begin = 0
        for start, end in runs(row):
            own = slice(begin, begin + end - start)
            begin = own.stop
            try:
                held[own] = sampler.rows(start, end - start)
            except (DataError, OSError):
                held[own], ignored[own] = _one_by_one(sampler, start, end, skip_bad)
    return tokens, bad


def _one_by_one(sampler: Sampler, start: int, end: int, skip_bad: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tokens = np.zeros((end - start, sampler.sequence_length + 1), dtype=np.int64)
    bad = np.zeros(end - start, dtype=np.int64)
    for index, place in enumerate(range(start, end)):
        try:
            tokens[index] = sampler.rows(place, 1)[0]
        except (DataError, OSError) as error:
            if not skip_bad:
                raise BadSample(place, error) from error
            bad[index] = 1
    return tokens, bad
