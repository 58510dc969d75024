"""Every token of a split sequence is on one rank, in order, and causal work is even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.context_layout import ContextLayout
from meshwright.estimate.traffic import Work, step_traffic
from meshwright.models.presets import preset
from meshwright.strategy import Strategy

LAYOUTS = st.builds(ContextLayout, st.integers(1, 6), st.integers(1, 4))


@given(LAYOUTS, st.integers(1, 200))
def test_every_token_is_on_one_rank(layout: ContextLayout, length: int) -> None:
    parts = [layout.positions(length, rank) for rank in range(layout.ring * layout.heads)]
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert all(part == sorted(part) for part in parts)
    assert layout.part_lengths(length) == [len(part) for part in parts]


@given(LAYOUTS, st.integers(1, 200), st.integers(1, 4))
def test_nearest_lengths_fit_and_none_between_does(layout: ContextLayout, length: int, multiple: int) -> None:
    nearest = layout.nearest_lengths(length, multiple)
    assert all(layout.fits(n, multiple) for n in nearest)
    assert nearest[-1] >= length
    between = range(nearest[0] + 1 if nearest[0] <= length else 1, nearest[-1])
    assert not any(layout.fits(n, multiple) for n in between)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ring", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("ulysses:2", [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_ranks_of_each_method_hold_these_tokens(method: str, expected: list[list[int]]) -> None:
    layout = ContextLayout.of(4, method)
    assert [layout.positions(16, rank) for rank in range(4)] == expected


@pytest.mark.parametrize("length", [512, 4096, 5000])
def test_places_of_a_ring_have_the_same_causal_work(length: int) -> None:
    layout = ContextLayout(4, 1)
    work = [sum(position + 1 for position in layout.place_positions(length, place)) for place in range(4)]
    assert max(work) <= 1.05 * sum(work) / len(work)


@pytest.mark.parametrize("strategy", ["cp=2", "pp=2", "dp=2 ep=2"])
def test_closed_forms_of_traffic_say_what_they_do_not_know(strategy: str) -> None:
    with pytest.raises(ValueError, match="closed forms of traffic know dp, zero and tp"):
        step_traffic(preset("tiny"), Strategy.parse(strategy, 2), Work(1, 1, 16))
