"""The batch schedule: position is the exact sum of the batches before a step, however the schedule is written."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.batch_schedule import BatchSchedule
from meshwright.errors import DataError


@st.composite
def stage_lists(draw: st.DrawFn) -> list[list[int]]:
    gaps = draw(st.lists(st.integers(1, 30), max_size=5))
    firsts = [0, *accumulate(gaps)]
    return [[first, draw(st.integers(1, 20))] for first in firsts]


@st.composite
def ramps(draw: st.DrawFn) -> tuple[int, int, int, int]:
    start, increment, count = (draw(st.integers(1, high)) for high in (20, 10, 8))
    return start, start + increment * count, draw(st.integers(count, 100)), increment


@given(stages=stage_lists(), steps=st.integers(0, 200))
def test_position_is_the_sum_of_the_batches_before(stages: list[list[int]], steps: int) -> None:
    schedule = BatchSchedule.parse(stages)
    naive = [next(batch for first, batch in reversed(stages) if first <= step) for step in range(steps)]
    assert [schedule.batch(step) for step in range(steps)] == naive
    assert schedule.position(steps) == sum(naive)
    assert schedule.sizes() == tuple(sorted({batch for _, batch in stages}))


@given(stages=stage_lists(), step=st.integers(0, 300), data=st.data())
def test_step_at_finds_the_step_that_takes_a_sample(stages: list[list[int]], step: int, data: st.DataObject) -> None:
    schedule = BatchSchedule.parse(stages)
    within = data.draw(st.integers(0, schedule.batch(step) - 1))
    assert schedule.step_at(schedule.position(step) + within) == step


@given(ramp=ramps())
def test_a_ramp_grows_along_the_line_and_arrives_on_time(ramp: tuple[int, int, int, int]) -> None:
    start, end, steps, increment = ramp
    schedule = BatchSchedule.parse(f"{start}..{end} over {steps} by {increment}")
    for step in range(steps):
        line = start + (end - start) * step / steps
        assert line - increment < schedule.batch(step) <= line
        assert (schedule.batch(step) - start) % increment == 0
    assert schedule.batch(steps) == schedule.batch(steps + 1000) == end


@given(value=st.one_of(stage_lists(), ramps().map(lambda r: f"{r[0]}..{r[1]} over {r[2]} by {r[3]}"), st.integers(1)))
def test_format_is_read_back_as_the_same_schedule(value: object) -> None:
    schedule = BatchSchedule.parse(value)  # type: ignore[arg-type]
    again = BatchSchedule.parse(schedule.format())
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again.format() == schedule.format()


def test_each_way_of_writing_has_its_canonical_form() -> None:
    assert BatchSchedule.parse(64).format() == 64
    assert BatchSchedule.parse("64").format() == 64
    assert BatchSchedule.parse(" 16..64   over 200 ").format() == "16..64 over 200"
    assert BatchSchedule.parse("16..64 over 200 by 16").format() == "16..64 over 200"
    assert BatchSchedule.parse("16..64 over 200 by 8").format() == "16..64 over 200 by 8"
    assert BatchSchedule.parse([[0, 8], [10, 32], [20, 16]]).format() == [[0, 8], [10, 32], [20, 16]]
    assert BatchSchedule.parse([[0, 8], [10, 8], [20, 16]]).stages == ((0, 8), (20, 16))
    assert BatchSchedule.parse("16..64 over 200").stages == ((0, 16), (67, 32), (134, 48), (200, 64))


def test_far_steps_cost_no_more_than_near_ones() -> None:
    schedule = BatchSchedule.parse("16..64 over 200")
    assert schedule.position(10**15) == schedule.position(200) + (10**15 - 200) * 64
    assert schedule.step_at(schedule.position(10**15)) == 10**15


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least 1"),
        (-3, "at least 1"),
        (True, "allowed"),
        (2.5, "allowed"),
        (None, "allowed"),
        ("fast", "allowed"),
        ("16..64", "allowed"),
        ("64..16 over 10", "must grow"),
        ("16..16 over 10", "must grow"),
        ("0..16 over 10", "must grow"),
        ("16..60 over 200", "do not divide 60 - 16 = 44"),
        ("16..64 over 200 by 0", "do not divide"),
        ("16..64 over 2", "do not fit in 2 steps"),
        ([], "begin at step 0"),
        ([[5, 8]], "begin at step 0"),
        ([[0, 8], [0, 16]], "must grow"),
        ([[0, 8], [9, 0]], "at least 1"),
        ([[0, 8, 1]], "pair of whole numbers"),
        ([[0, 8.5]], "pair of whole numbers"),
        ([8], "pair of whole numbers"),
        (["08"], "pair of whole numbers"),
    ],
)
def test_a_wrong_schedule_is_refused_with_what_to_change(value: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        BatchSchedule.parse(value)  # type: ignore[arg-type]


def test_the_suggested_increment_is_one_that_works() -> None:
    with pytest.raises(DataError, match="such as 'by 11'"):
        BatchSchedule.parse("16..60 over 200")
    BatchSchedule.parse("16..60 over 200 by 11")
