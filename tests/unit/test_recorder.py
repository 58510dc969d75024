"""The parts of a step, what recording costs in words, and which values are spikes."""

from __future__ import annotations

import random

import pytest

from meshwright.observe.breakdown import Step, break_down
from meshwright.observe.collective_rows import Collective
from meshwright.observe.host_phases import Timed
from meshwright.observe.rank_lines import facts_of, parts_of
from meshwright.observe.recording_cost import SUM_EVERY, TELL_AFTER, Cost
from meshwright.observe.step_metrics import WINDOW, Recent, Restless, Window
from meshwright.observe.step_spans import spans_of
from meshwright.schedules import Action


def test_all_phases_of_a_save_are_one_part_and_strange_time_is_not_attributed() -> None:
    phases = {"forward": 1.0, "stage": 0.1, "write": 0.2, "commit": 0.3, "retention": 0.4, "end": 0.5}
    found = parts_of(Timed.of(7, 3.0, phases), None)
    assert found == {"forward": 1.0, "checkpoint": pytest.approx(1.0), "unattributed": pytest.approx(1.0)}


def test_a_profile_takes_its_waits_out_of_the_phases_of_the_step_in_which_they_lie() -> None:
    """Not out of a save's, which is no part of what a step computes and waits for."""
    borders = [("forward", 0.0), ("backward", 1.0), ("stage", 3.0), ("write", 3.5)]
    step = Step(0.0, 4.0, borders, [(0, 1), (2, 3)], [(1.5, 2), (3.25, 4)], waits=[(1, 1.5)], host=False)
    timed = Timed.of(1, 4.5, {"forward": 1.0, "backward": 2.0, "stage": 0.5, "write": 0.5, "hooks": 0.5})
    found = parts_of(timed, break_down(step))
    assert found == {
        "forward": 1.0,
        "backward": 1.0,
        "checkpoint": 1.0,
        "hooks": 0.5,
        "communication": 0.5,
        "bubble": 0.5,
    }
    facts = facts_of(break_down(step))
    assert facts["exposed_in"] == {"backward": 0.5}
    assert facts["bubble_in"] == {"backward": 0.5}


def test_cost_of_profiles_is_told_once_and_without_what_only_some_steps_do() -> None:
    cost, told = Cost(50), []
    for step in range(1, 30):
        phases = {"forward": 0.1, "evaluate": 3.0} if step == 5 else {"forward": 0.1}
        profiled = step == 5
        cost.add(Timed.of(step, 0.3 + 3.0 if profiled else 0.1, phases), profiled)
        if cost.is_to_tell:
            told.append((step, cost.sentence()))
    share = 0.2 / (0.2 + 50 * 0.1)
    assert told == [(5 + TELL_AFTER, f"watch  profiling 1 step in 50 costs {share:.2%} of the time")]


def test_cost_is_summed_up_now_and_then() -> None:
    cost = Cost(0)
    due = []
    for step in range(1, 2 * SUM_EVERY + 1):
        cost.inside += 0.001
        if cost.add(Timed.of(step, 0.1, {}), profiled=False):
            due.append(cost.line(step))
    assert [line["step"] for line in due] == [SUM_EVERY, 2 * SUM_EVERY]
    assert all(line["share"] == pytest.approx(0.01) and "profiler_s" not in line for line in due)


def test_what_a_step_usually_costs_is_without_what_calls_waited_for_a_core() -> None:
    cost = Cost(0)
    for step in range(1, 11):
        cost.add_calls(1.0 if step == 3 else 0.001)
        cost.add(Timed.of(step, 0.1, {}), profiled=False)
    # A thread's share, for example.
    cost.inside += 0.005
    line = cost.line(10)
    assert line["inside_s"] == pytest.approx(1.014)
    assert line["usual_s"] == pytest.approx(0.0015)


def test_a_leap_is_a_spike_and_noise_is_none() -> None:
    draw, calm = random.Random(1), Restless()
    assert not any(calm.is_spike(3 + draw.gauss(0, 0.05)) for _ in range(3 * WINDOW))
    assert calm.is_spike(4.0)
    assert not calm.is_spike(None)
    flat = Restless()
    assert not any(flat.is_spike(1.0 + 1e-7 * (step % 2)) for step in range(WINDOW))
    # A window that a leap has left knows nothing of it.
    wild = Restless()
    for step in range(2 * WINDOW):
        wild.is_spike(1e9 if step == 20 else 2 + draw.gauss(0, 0.01))
    assert wild.is_spike(2.5)


def test_passes_of_a_pipeline_stand_for_its_phases_on_the_timeline() -> None:
    phases = [("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("optimizer", 4.0)]
    sent = Collective("receive", "pp", 2, 2**20, 1.5, 2.0)
    summed = Collective("all_reduce", "dp", 2, 4 * 2**20, 3.0, 3.5)
    found = spans_of(phases, 5.0, [(Action("F", 1, 3), 1.0, 1.4), (Action("W", 1, 3), 2.0, 3.9)], [sent, summed])
    assert found == [
        ("data", "data", 0.0, 1.0),
        ("F stage 1 micro-batch 3", "forward", 1.0, 1.4),
        ("receive pp 1.0 MiB", "transfer", 1.5, 2.0),
        ("W stage 1 micro-batch 3", "backward", 2.0, 3.9),
        ("all_reduce dp 4.0 MiB", "collective", 3.0, 3.5),
        ("optimizer", "optimizer", 4.0, 5.0),
    ]


def test_sums_over_a_window_are_those_of_its_values_also_after_a_leap() -> None:
    draw, window, values = random.Random(2), Window(), []
    for step in range(4 * WINDOW + 7):
        values.append(1e12 if step == 150 else draw.gauss(2, 0.5))
        window.add(values[-1])
        last = values[-WINDOW:]
        squares = [value * value for value in last]
        assert window.sums() == (len(last), pytest.approx(sum(last)), pytest.approx(sum(squares)))
    shares = Recent()
    found = [shares.share_with(step % 3 == 0) for step in range(2 * WINDOW)]
    assert found[:4] == [1.0, 0.5, pytest.approx(1 / 3), 0.5]
    assert found[-1] == sum(step % 3 == 0 for step in range(WINDOW, 2 * WINDOW)) / WINDOW
