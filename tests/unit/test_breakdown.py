"""Where the time of a step went, from spans that were made by hand, and that nothing gets lost whatever the spans."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.bandwidth import bus_factor
from meshwright.observe.breakdown import Interval, Step, break_down, intersect, subtract, total, union
from meshwright.observe.collective_rows import Collective, human_bytes, rows, size_class

PHASES = [("data", 0.0), ("forward", 1.0), ("backward", 4.0), ("reduce", 8.0), ("optimizer", 9.0)]


def test_communication_behind_computation_is_overlapped_and_the_rest_exposed() -> None:
    step = Step(0.0, 10.0, PHASES, compute=[(1, 4), (4, 7), (9, 10)], communication=[(5, 9)], host=False)
    found = break_down(step)
    assert (found.compute, found.exposed, found.overlapped, found.bubble, found.idle) == (7, 2, 2, 0, 1)
    assert found.exposed_in == {"backward": 1.0, "reduce": 1.0}
    assert found.net == {"data": 1.0, "forward": 3.0, "backward": 3.0, "reduce": 0.0, "optimizer": 1.0}


def test_python_between_operators_is_no_wait_unless_a_communication_ends_there() -> None:
    """A transfer that is under way all the time must not turn a phase's own overhead into communication."""
    compute: list[Interval] = [(1, 2), (2.1, 4), (4, 6), (7.5, 8)]
    found = break_down(Step(0.0, 10.0, PHASES, compute, communication=[(0.5, 7)]))
    # From 2 to 2.1 nobody waited; from 6 to 7 somebody did, and from 7 to 7.5 the host did something else.
    assert found.exposed == pytest.approx(1.0)
    assert found.exposed_in == {"backward": pytest.approx(1.0)}
    assert found.overlapped == pytest.approx(5.5)
    on_device = break_down(Step(0.0, 10.0, PHASES, compute, communication=[(0.5, 7)], host=False))
    assert on_device.exposed == pytest.approx(0.5 + 0.1 + 1.0)


def test_a_wait_whose_end_is_noted_late_is_a_wait() -> None:
    compute: list[Interval] = [(1, 4), (4, 6), (7.5, 8)]
    found = break_down(Step(0.0, 10.0, PHASES, compute, communication=[(5, 7.501)]))
    assert found.exposed == pytest.approx(1.5)
    # Much later, it went on beside what was computed; and a moment between two operators is too short to wait in.
    assert break_down(Step(0.0, 10.0, PHASES, compute, communication=[(5, 7.6)])).exposed == 0
    short: list[Interval] = [(1, 4), (4.0001, 8)]
    assert break_down(Step(0.0, 10.0, PHASES, short, communication=[(3, 4.002)])).exposed == 0


def test_waiting_for_another_stage_is_bubble_and_not_communication() -> None:
    step = Step(0.0, 10.0, PHASES, [(1, 2), (5, 8)], communication=[(2, 5), (8, 8.5)], waits=[(2, 5), (4.5, 5.5)])
    found = break_down(step)
    assert (found.bubble, found.exposed, found.compute) == (3, 0.5, 4)
    assert found.bubble_in == {"forward": 2.0, "backward": 1.0}
    assert found.exposed_in == {"reduce": 0.5}


def test_a_message_that_comes_while_a_host_does_something_else_is_not_waited_for() -> None:
    step = Step(0.0, 10.0, PHASES, [(1, 2), (8, 10)], communication=[], waits=[(6, 7)], transfers=[(1.5, 4), (5, 7)])
    found = break_down(step)
    assert (found.bubble, found.exposed, found.idle) == (1, 0, 6)
    assert found.overlapped == 3.5


@pytest.mark.parametrize("host", [False, True])
def test_waiting_for_another_stage_in_a_sum_is_bubble_and_not_communication(host: bool) -> None:
    step = Step(0.0, 10.0, PHASES, [(0, 6)], communication=[(6, 7)], meetings=[(7, 9)], host=host)
    found = break_down(step)
    assert (found.bubble, found.exposed, found.idle) == (2, 1, 1)


@pytest.mark.parametrize("host", [False, True])
def test_what_comes_after_the_update_is_no_part_of_a_breakdown(host: bool) -> None:
    phases = [("forward", 0.0), ("evaluate", 4.0), ("stage", 8.0), ("hooks", 9.0), ("data", 9.5)]
    found = break_down(Step(0.0, 10.0, phases, [(0, 3), (4, 6)], communication=[(3, 4), (6, 9)], host=host))
    assert (found.compute, found.exposed, found.idle) == (3, 1, 0.5)
    assert found.exposed_in == {"forward": 1}
    assert found.net["evaluate"] == 4


def test_what_lies_outside_of_the_step_does_not_count() -> None:
    found = break_down(Step(2.0, 6.0, PHASES, [(0, 3)], [(5, 9)], [(-1, 2.5)], host=False))
    assert (found.compute, found.exposed, found.bubble, found.idle) == (1, 1, 0, 2)
    assert found.phases == {"forward": 2.0, "backward": 2.0}


intervals = st.lists(
    st.tuples(st.integers(-20, 120), st.integers(0, 40)).map(lambda one: (one[0] / 8, (one[0] + one[1]) / 8)),
    max_size=12,
)
borders = st.lists(st.tuples(st.sampled_from(["forward", "backward", "hooks"]), st.integers(0, 96)), max_size=8)


@settings(max_examples=300, deadline=None)
@given(intervals, intervals, intervals, intervals, intervals, borders, st.booleans())
def test_parts_add_up_to_the_wall_time_and_are_never_negative(
    compute: list[Interval],
    communication: list[Interval],
    waits: list[Interval],
    meetings: list[Interval],
    transfers: list[Interval],
    later: list[tuple[str, int]],
    host: bool,
) -> None:
    phases = [("data", 0.0), *sorted(((name, at / 8) for name, at in later), key=lambda one: one[1])]
    found = break_down(Step(0.0, 12.0, phases, compute, communication, waits, meetings, transfers, host))
    seconds = [found.compute, found.exposed, found.bubble, found.idle]
    assert sum(seconds) == pytest.approx(12.0 - found.phases.get("hooks", 0.0))
    assert min(*seconds, found.overlapped, *found.net.values()) >= 0
    assert sum(found.net.values()) + found.exposed + found.bubble == pytest.approx(12.0)
    assert sum(found.exposed_in.values()) == pytest.approx(found.exposed)
    assert sum(found.bubble_in.values()) == pytest.approx(found.bubble)
    assert found.exposed + found.overlapped <= total(union([*communication, *meetings, *transfers])) + 1e-9


@settings(max_examples=300, deadline=None)
@given(intervals, intervals)
def test_intervals_are_sets_of_moments(first: list[Interval], second: list[Interval]) -> None:
    here, there = union(first), union(second)
    # Every interval begins and ends on an eighth: the middles between them tell it all.
    moments = [number / 8 + 1 / 16 for number in range(-24, 168)]

    def holds(found: list[Interval], moment: float) -> bool:
        return any(begin < moment < end for begin, end in found)

    for moment in moments:
        one, other = holds(first, moment), holds(second, moment)
        assert holds(here, moment) == one
        assert holds(intersect(here, there), moment) == (one and other)
        assert holds(subtract(here, there), moment) == (one and not other)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("receive", 2) == bus_factor("all_reduce", 1) == 1.0
    (row,) = rows([Collective("all_reduce", "dp", 4, 1_500_000, 0.0, 0.001)] * 2)
    assert row == {
        "group": "dp",
        "operation": "all_reduce",
        "size": "1-4 MiB",
        "count": 2,
        "bytes": 3_000_000,
        "seconds": 0.002,
        "algorithm_gb_s": 1.5,
        "bus_gb_s": 2.25,
    }


def test_sizes_fall_into_classes_of_powers_of_four() -> None:
    found = [size_class(count) for count in (8, 1024, 5000, 2**18, 2**20, 2**22 - 1, 2**22)]
    assert found == ["below 1 KiB", "1-4 KiB", "4-16 KiB", "256 KiB-1 MiB", "1-4 MiB", "1-4 MiB", "4-16 MiB"]
    assert human_bytes(4 * 2**20) == "4.0 MiB"
