"""The rule by which lengths are cut is that of torch.chunk, empty parts included; small neighbours go together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cuts import buckets_of, group_small, longest_part, part, part_length

LENGTHS, PARTS = st.integers(0, 300), st.integers(1, 40)


@given(LENGTHS, PARTS)
def test_parts_are_those_of_chunk(length: int, parts: int) -> None:
    whole = torch.arange(length)
    chunks = list(whole.chunk(parts)) if length else []
    chunks += [whole[:0]] * (parts - len(chunks))
    cut = [whole[part(length, parts, index)] for index in range(parts)]
    assert [piece.tolist() for piece in cut] == [piece.tolist() for piece in chunks]
    assert [part_length(length, parts, index) for index in range(parts)] == [len(piece) for piece in chunks]
    assert longest_part(length, parts) == len(chunks[0])


@given(LENGTHS, PARTS)
def test_parts_follow_on_each_other_and_stay_inside(length: int, parts: int) -> None:
    cut = [part(length, parts, index) for index in range(parts)]
    assert cut[0].start == 0
    assert cut[-1].stop == length
    assert all(one.stop == other.start for one, other in zip(cut, cut[1:], strict=False))


@pytest.mark.parametrize(
    ("length", "parts", "lengths"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0]), (0, 2, [0, 0])],
)
def test_last_parts_are_shorter_or_empty(length: int, parts: int, lengths: list[int]) -> None:
    assert [part_length(length, parts, index) for index in range(parts)] == lengths


SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.integers(1, 100))
def test_groups_are_neighbours_and_just_large_enough(sizes: list[int], least: int) -> None:
    groups = group_small(sizes, least, least)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    for group in groups[:-1]:
        assert sum(sizes[index] for index in group) >= least
    for group in groups:
        assert group
        assert sum(sizes[index] for index in group[:-1]) < least, "a group that is large enough takes no more"


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([10, 10], [[0], [1]]),
        ([9, 1, 9], [[0, 1], [2]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([4, 4, 4, 20], [[0, 1, 2], [3]]),
    ],
)
def test_small_ones_are_grouped(sizes: list[int], groups: list[list[int]]) -> None:
    assert group_small(sizes, 10, 10) == groups
    assert group_small(sizes, 9, 10) == [], "a small model is one unit"


@given(SIZES, st.integers(1, 100))
def test_buckets_are_neighbours_and_as_full_as_they_go(sizes: list[int], most: int) -> None:
    buckets = buckets_of(sizes, most)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in bucket) for bucket in buckets]
    assert all(size <= most or len(bucket) == 1 for size, bucket in zip(held, buckets, strict=True))
    assert all(held[at] + sizes[buckets[at + 1][0]] > most for at in range(len(buckets) - 1))
