"""Where a run's data lies once windows of samples are left out."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.skips import SkippedWindows, runs

WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda w: (w[0], w[0] + w[1])), max_size=6)


@given(WINDOWS)
def test_a_run_is_fed_every_place_once_but_for_the_windows(windows: list[tuple[int, int]]) -> None:
    skips = SkippedWindows(windows)
    left = [place for place in range(200) if not any(start <= place < end for start, end in windows)]
    counts = np.arange(len(left))
    assert skips.places(counts).tolist() == left
    assert [skips.place(count) for count in counts.tolist()] == left


@given(WINDOWS)
def test_windows_are_kept_in_order_and_apart_and_survive_a_checkpoint(windows: list[tuple[int, int]]) -> None:
    skips, again = SkippedWindows(windows), SkippedWindows([(3, 5)])
    flat = [edge for window in skips.windows for edge in window]
    assert flat == sorted(set(flat))
    again.restore(json.loads(json.dumps(skips.state())))
    assert again.windows == skips.windows
    assert SkippedWindows(reversed(windows)).windows == skips.windows


def test_what_was_known_before_a_later_window_stays_where_it_was() -> None:
    skips = SkippedWindows([(8, 16)])
    before = skips.places(np.arange(20))
    skips.add(24, 32)
    after = skips.places(np.arange(20))
    assert before[:16].tolist() == after[:16].tolist()
    assert after[16:].tolist() == [32, 33, 34, 35]


def test_a_window_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="from 5 to 4"):
        SkippedWindows([(5, 4)])


@given(st.lists(st.integers(0, 30), max_size=20))
def test_runs_are_the_numbers_in_their_order(numbers: list[int]) -> None:
    found = runs(np.array(numbers, dtype=np.int64))
    assert [number for start, end in found for number in range(start, end)] == numbers
