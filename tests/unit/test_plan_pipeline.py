"""Lengths and held micro-batches of pipelines: the fast forms against the schedules themselves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planning.answer import plan
from meshwright.planning.links import far_borders
from meshwright.planning.pipeline import ROUNDS, StageTimes, in_flight, length, shortest, waiting_weights
from meshwright.schedules import make_program, simulate, splits_backward, stages_per_rank

SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zero-bubble", "zbv")


def times_of(schedule: str, ranks: int, seconds: list[float], transfers: list[float]) -> StageTimes:
    stages = ranks * stages_per_rank(schedule)
    forward = [seconds[stage % len(seconds)] for stage in range(stages)]
    split = splits_backward(schedule)
    weights = [0.9 * one if split else 0.0 for one in forward]
    return StageTimes(forward, [1.1 * one if split else 2 * one for one in forward], weights, transfers)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 5),
    st.integers(1, 12),
    st.lists(st.floats(0.1, 3.0), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 5.0]), min_size=5, max_size=5),
)
def test_length_is_that_of_the_simulation_and_not_below_the_bound(
    schedule: str, ranks: int, micro: int, seconds: list[float], borders: list[float]
) -> None:
    transfers = borders[:ranks]
    # Two ranks have one border.
    transfers = transfers if ranks > 2 else transfers[:1] * 2
    times = times_of(schedule, ranks, seconds, transfers)
    program = make_program(schedule, ranks, micro)
    simulated = simulate(program, lambda action: times.of(action.kind, action.stage), transfers).length
    if micro <= ROUNDS * ranks + micro % ranks + ranks:
        assert length(schedule, ranks, micro, times) == pytest.approx(simulated)
    assert shortest(schedule, ranks, micro, times) <= simulated + 1e-9


@pytest.mark.parametrize(
    ("domain", "width", "ranks", "far"),
    [
        (8, 8, 2, "11"),
        (8, 4, 2, "00"),
        (8, 4, 4, "0101"),
        (8, 2, 8, "00010001"),
        (8, 16, 3, "111"),
        # Of the ranks 3, 4, 5 of the second stage one sends to another machine, of 6, 7, 8 two.
        (8, 3, 4, "0111"),
        (72, 8, 9, "000000000"),
    ],
)
def test_what_passes_between_stages_is_far_where_machines_end(domain: int, width: int, ranks: int, far: str) -> None:
    assert far_borders(domain, width, ranks) == tuple(one == "1" for one in far)


def test_a_slow_network_is_waited_for_wherever_in_the_pipeline_it_lies(tmp_path: Path) -> None:
    """Two machines of eight: whatever the number of stages, one border of them goes over the network."""
    file = tmp_path / "cluster.toml"
    file.write_text('chip = "h100"\nnodes = 2\nnic = 0.0625\n')

    def step(strategy: str) -> float:
        asked = plan("llama3.2-1b", str(file), strategy=strategy, micro_batch=1, sequence_length=4096, global_batch=64)
        return asked.candidates[0].step_s

    times = [step(one) for one in ("dp=8 pp=2", "dp=4 pp=4", "dp=2 pp=8", "dp=1 pp=16")]
    # A data rank less is a card less for the same bytes.
    for one, other in pairwise(times):
        assert 1.5 * one < other < 2.5 * one


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_long_runs_are_what_short_ones_add_up_to(schedule: str, ranks: int) -> None:
    times = times_of(schedule, ranks, [1.0, 1.2, 0.9], [0.05] * ranks)
    micro = 12 * ranks
    program = make_program(schedule, ranks, micro)
    simulated = simulate(program, lambda action: times.of(action.kind, action.stage), times.transfers).length
    assert length(schedule, ranks, micro, times) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 8), (3, 5), (4, 4), (4, 12), (4, 17), (8, 16)])
def test_held_micro_batches_are_counted_in_the_schedule(schedule: str, ranks: int, micro: int) -> None:
    program = make_program(schedule, ranks, micro)
    released = "W" if splits_backward(schedule) else "B"
    for rank, actions in enumerate(program.order):
        held = waiting = 0
        most = 0, 0
        for action in actions:
            held += action.kind == "F"
            waiting += action.kind == "I"
            most = max(most, (held, waiting))
            held -= action.kind == released
            waiting -= action.kind == "W"
        assert sum(in_flight(schedule, ranks, micro)[rank]) == most[0], rank
        # zbv is made by playing it through: there it is nearly what a formula says.
        assert abs(waiting_weights(schedule, ranks, micro)[rank] - most[1]) <= (schedule == "zbv") * max(
            2, ranks // 2
        ), rank
