"""Windows of samples that a run leaves out: where its data lies, once it is no longer the pure count of samples.

A run counts the samples that it trains on; the sampler has a sample at every place 0, 1, 2, ... . Both are the same
until a window of places is skipped; from then on a count lies behind the windows before it. The place is a
pure function of the count and the list of windows, which checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SkippedWindows:
    """The windows [start, end) of places that are left out, in order and apart from each other."""

    def __init__(self, windows: Iterable[Iterable[int]] = ()) -> None:
        self.windows: list[tuple[int, int]] = []
        for start, end in windows:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Leave out the places from `start` to before `end` as well."""
        if not 0 <= start <= end:
            raise ValueError(f"a window of samples from {start} to {end}")
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.windows, (start, end)]):
            if first == last:
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], last)
            else:
                merged.append((first, last))
        self.windows = merged

    def place(self, count: int) -> int:
        """Where the sample lies before which a run has trained on that many."""
        for start, end in self.windows:
            if count >= start:
                count += end - start
        return count

    def places(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for many."""
        if not self.windows:
            return counts
        starts, ends = np.array(self.windows, dtype=np.int64).T
        skipped = np.concatenate([[0], np.cumsum(ends - starts)])
        return counts + skipped[np.searchsorted(starts - skipped[:-1], counts, side="right")]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember."""
        return {"skipped_windows": [list(window) for window in self.windows]} if self.windows else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint remembers."""
        self.windows = []
        for start, end in state.get("skipped_windows", ()):
            self.add(start, end)


def runs(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Numbers as ranges [start, end), in their order."""
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, breaks)]
