"""The computed shuffle: a bijection for every size and key, and as mixed as a stored one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.permutation import LARGEST, Permutation, derive_key, numbered_keys, permute

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


@given(size=st.integers(1, 5000), key=KEYS)
def test_every_number_comes_exactly_once(size: int, key: int) -> None:
    shuffled = Permutation(size, key)(np.arange(size, dtype=np.uint64))
    assert np.array_equal(np.sort(shuffled), np.arange(size, dtype=np.uint64))


@given(size=st.integers(1, LARGEST), key=KEYS, data=st.data())
def test_distinct_numbers_stay_distinct_and_inside_for_huge_sizes(size: int, key: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    shuffled = Permutation(size, key)(np.array(chosen, dtype=np.uint64))
    assert len(np.unique(shuffled)) == len(chosen)
    assert int(shuffled.max()) < size


@given(size=st.integers(1, 10**12), key=KEYS, data=st.data())
def test_one_number_alone_goes_where_it_goes_among_many(size: int, key: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=10))
    permutation = Permutation(size, key)
    assert [permutation(index) for index in chosen] == permutation(np.array(chosen, dtype=np.uint64)).tolist()


@given(size=st.integers(1, 1000), keys=st.lists(KEYS, min_size=2, max_size=5))
def test_a_key_for_each_number_is_the_same_as_one_call_a_key(size: int, keys: list[int]) -> None:
    indices = np.arange(size, dtype=np.uint64)
    together = permute(np.tile(indices, len(keys)), size, np.repeat(np.array(keys, dtype=np.uint64), size))
    apart = np.concatenate([Permutation(size, key)(indices) for key in keys])
    assert np.array_equal(together, apart)


def test_the_result_is_the_same_on_every_machine_and_in_every_version() -> None:
    # A run that was begun with one version must see the same samples when it goes on with another.
    assert Permutation(1000, 7)(np.arange(6, dtype=np.uint64)).tolist() == [713, 760, 13, 321, 76, 369]
    assert Permutation(LARGEST, 7)(1) == 49857994702899109


def _chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the counts are more uneven than chance makes them."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - counts.size) / np.sqrt(2 * counts.size))


@pytest.mark.parametrize("size", [4096, 99_991, 1_000_000])
def test_neighbours_are_scattered_over_the_whole_range(size: int) -> None:
    for key in range(5):
        shuffled = Permutation(size, derive_key("test", key))(np.arange(size, dtype=np.uint64)).astype(np.int64)
        first, second = shuffled[:-1] * 32 // size, shuffled[1:] * 32 // size
        assert abs(_chi_square(np.bincount(first * 32 + second, minlength=1024))) < 6
        where = np.arange(size) * 32 // size
        assert _chi_square(np.bincount(where * 32 + shuffled * 32 // size, minlength=1024)) < 6
        assert (shuffled == np.arange(size)).sum() < 10
        assert (np.diff(shuffled) == 1).sum() < 10


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17])
def test_small_sizes_use_every_place_evenly_over_keys(size: int) -> None:
    keys = numbered_keys(1, np.arange(20_000, dtype=np.uint64))
    for index in range(size):
        places = permute(np.full(len(keys), index, dtype=np.uint64), size, keys).astype(np.int64)
        assert _chi_square(np.bincount(places, minlength=size)) < 6


def test_keys_that_follow_each_other_give_unrelated_shuffles() -> None:
    indices = np.arange(10_000, dtype=np.uint64)
    keys = numbered_keys(derive_key("epoch", 0), np.arange(2, dtype=np.uint64))
    one, other = (Permutation(10_000, int(key))(indices).astype(float) for key in keys)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    raw_one, raw_other = (Permutation(10_000, key)(indices).astype(float) for key in (0, 1))
    assert abs(np.corrcoef(raw_one, raw_other)[0, 1]) < 0.05


@pytest.mark.parametrize("size", [0, -1, LARGEST + 1])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 2\\^63"):
        Permutation(size, 0)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(10, 0)(10)
