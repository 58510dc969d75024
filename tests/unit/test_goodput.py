"""Where the time of a run went: every second has one place, and what a failure cost is seen."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe import goodput as goodput_
from meshwright.observe.goodput import PARTS, Goodput
from meshwright.observe.rank_files import RankRecord

Line = dict[str, Any]


def event(time: float, kind: str, **facts: Any) -> Line:
    return {"time": time, "event": kind, **facts}


def steps(first: int, last: int, begin: float, seconds: float = 1.0, **facts: Any) -> list[Line]:
    """Lines of metrics of steps one right after the other."""
    return [
        {"step": step, "time": begin + (step - first + 1) * seconds, "step_s": seconds, **facts}
        for step in range(first, last + 1)
    ]


def rank_steps(first: int, last: int, begin: float, **parts: float) -> list[Line]:
    """A rank's lines of the same."""
    seconds = sum(parts.values())
    return [
        {"kind": "step", "step": step, "time": begin + (step - first + 1) * seconds, "seconds": seconds, "parts": parts}
        for step in range(first, last + 1)
    ]


def goodput(
    events: list[Line],
    metrics: list[Line],
    ranks: dict[int, list[Line]] | None = None,
    began: float | None = None,
    now: float | None = None,
) -> Goodput:
    """The account, from the lines of ranks."""
    records = {rank: RankRecord(rank) for rank in ranks or {}}
    for rank, lines in (ranks or {}).items():
        for line in lines:
            records[rank].take(line)
    return goodput_.goodput(events, metrics, records, began, now)


def check(found: Goodput, **expected: float) -> None:
    """The account adds up and has these parts, and no others."""
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert {name: seconds for name, seconds in found.parts.items() if seconds > 1e-6} == pytest.approx(expected)


def test_steps_whose_update_was_left_out_are_no_progress() -> None:
    told = [event(100.0, "started", step=0)]
    lines = [*steps(1, 4, 100.0), *steps(5, 6, 104.0, skipped=1), *steps(7, 8, 106.0)]
    check(goodput(told, lines), progress=6.0, skipped=2.0)


def test_a_run_that_gives_up_at_its_first_failure_was_not_restarted() -> None:
    told = [event(100.0, "started", step=0), event(104.4, "failed", step=5, phase="forward"), event(104.5, "gave_up")]
    found = goodput(told, steps(1, 4, 100.0))
    check(found, progress=4.0, ending=0.5)
    assert found.restarts == 0


def test_undisturbed_run_is_progress_but_for_its_start_and_evaluation() -> None:
    lines = steps(1, 4, 105.0)
    lines[-1] |= {"time": 111.0, "eval_s": 2.0}
    found = goodput([event(103.0, "started", step=0), event(112.0, "finished", step=4)], lines, began=100.0)
    check(found, startup=5.0, progress=4.0, evaluation=2.0, ending=1.0)
    assert found.wall_s == 12.0
    assert found.share == pytest.approx(1 / 3)
    assert found.losses()[0] == ("startup", pytest.approx(5 / 12))


def test_failure_costs_lost_steps_and_the_time_until_the_first_new_one() -> None:
    told = [
        event(100.0, "started", step=0),
        event(109.0, "failed", step=8, phase="forward"),
        event(112.0, "resumed", step=5),
        event(120.0, "finished", step=10),
    ]
    # Of the first turn of steps 6 and 7 nothing is left in the metrics.
    found = goodput(told, [*steps(1, 5, 100.0), *steps(6, 10, 115.0)])
    check(found, progress=10.0, replayed=2.0, restart=8.0)
    assert (found.restarts, found.lost_steps) == (1, 2)
    # A failure between steps: the step's update was made.
    told[1] = event(109.0, "failed", step=7, phase="hooks")
    assert goodput(told, [*steps(1, 5, 100.0), *steps(6, 10, 115.0)]).lost_steps == 2


def test_lines_of_ranks_tell_how_long_the_lost_steps_took() -> None:
    told = [event(100.0, "started", step=0), event(112.0, "resumed", step=5), event(120.0, "finished", step=10)]
    ranks = {0: [*rank_steps(1, 5, 100.0, forward=1.0), *rank_steps(6, 7, 105.0, forward=1.5)]}
    # Nobody told of the failure: the launcher was killed.
    found = goodput(told, [*steps(1, 5, 100.0), *steps(6, 10, 115.0)], ranks)
    check(found, progress=10.0, replayed=3.0, restart=7.0)
    assert found.lost_steps == 2


@pytest.mark.alone
def test_many_restarts_of_a_long_run_cost_the_account_little() -> None:
    lines = steps(1, 20_000, 100.0)

    def seconds(restarts: int) -> float:
        told = [event(100.0, "started", step=0)]
        every = 20_000 // restarts
        told += [event(100.5 + step, "resumed", step=step) for step in range(every, 20_000, every)]
        began = time.process_time()
        assert goodput(told, lines).restarts == restarts - 1
        return time.process_time() - began

    assert seconds(400) < 4 * seconds(2)


def test_rollback_makes_undone_steps_vain() -> None:
    told = [
        event(100.0, "started", step=0),
        event(109.0, "rollback", step=8, to=5, seconds=1.0),
        event(114.0, "finished", step=10),
    ]
    found = goodput(told, [*steps(1, 5, 100.0), *steps(6, 10, 109.0)])
    check(found, progress=10.0, replayed=3.0, restart=1.0)
    assert found.lost_steps == 3


def test_time_in_which_a_run_was_stopped_counts_as_nothing() -> None:
    told = [
        event(100.0, "started", step=0),
        event(102.0, "stopped", step=2, reason="SIGINT"),
        event(5000.0, "resumed", step=2),
        event(5003.0, "finished", step=4),
    ]
    found = goodput(told, [*steps(1, 2, 100.0), *steps(3, 4, 5001.0)])
    check(found, progress=4.0, startup=1.0)
    assert found.away_s == 4898.0
    told[1]["reason"] = "machines come or go"
    found = goodput(told, [*steps(1, 2, 100.0), *steps(3, 4, 5001.0)])
    check(found, progress=4.0, restart=4899.0)


def test_saves_are_taken_out_of_what_is_not_known() -> None:
    told = [
        event(100.0, "started", step=0),
        event(102.0, "checkpoint", step=1, stalled_s=0.5, seconds=2.0),
        event(104.0, "finished", step=2),
    ]
    lines = [*steps(1, 1, 100.0), *steps(2, 2, 102.0)]
    check(goodput(told, lines), progress=2.0, checkpoint=0.5, unknown=0.5, ending=1.0)
    ranks = {0: rank_steps(1, 2, 100.0, forward=1.0, checkpoint=0.4)}
    check(goodput(told, lines, ranks), progress=2.0, checkpoint=0.8, unknown=0.2, ending=1.0)


def test_waiting_within_steps_is_no_progress() -> None:
    told, lines = [event(100.0, "started", step=0), event(110.0, "finished", step=10)], steps(1, 10, 100.0)
    plain = rank_steps(1, 9, 100.0, data=0.1, forward=0.9)
    profiled = [
        line | {"profiled": True}
        for line in rank_steps(10, 10, 109.0, data=0.1, forward=0.5, communication=0.3, bubble=0.1)
    ]
    other = [line | {"profiled": True} for line in rank_steps(10, 10, 109.0, data=0.1, forward=0.8, communication=0.1)]
    # Unprofiled steps are taken for what profiled ones were, and ranks for their mean.
    found = goodput(told, lines, {0: [*plain, *profiled], 1: [*plain, *other]})
    check(found, progress=6.5, data=1.0, communication=2.0, bubble=0.5)
    idle = [line | {"pipeline_idle": 0.25} for line in lines]
    check(goodput(told, idle), progress=7.5, bubble=2.5)
    check(
        goodput(told, idle, {0: rank_steps(1, 10, 100.0, forward=0.2, backward=0.4, optimizer=0.4)}),
        progress=8.5,
        bubble=1.5,
    )


def test_a_run_that_goes_on_is_accounted_for_until_now() -> None:
    told = [event(100.0, "started", step=0)]
    check(goodput(told, [], now=104.0), startup=4.0)
    check(goodput(told, steps(1, 3, 101.0), now=104.5), startup=1.0, progress=3.0, unknown=0.5)
    told.append(event(104.2, "failed", step=4, phase="backward"))
    check(goodput(told, steps(1, 3, 101.0), now=106.0), startup=1.0, progress=3.0, restart=2.0)
    check(goodput(told, steps(1, 3, 101.0)), startup=1.0, progress=3.0, restart=0.2)
    # What nothing follows on is over.
    told.append(event(104.5, "gave_up"))
    check(goodput(told, steps(1, 3, 101.0), now=200.0), startup=1.0, progress=3.0, ending=0.5)


def test_a_long_run_is_accounted_for_from_its_first_step() -> None:
    told = [event(100.0, "started", step=0), event(1100.0, "finished", step=500)]
    ranks = {0: rank_steps(1, 500, 100.0, data=0.2, forward=0.8, checkpoint=0.4, hooks=0.6)}
    lines = steps(1, 500, 101.0, seconds=2.0)
    for line in lines:
        line |= {"step_s": 1.0, "time": line["time"] - 1.0}
    check(goodput(told, lines, ranks), startup=1.0, progress=400.0, data=100.0, checkpoint=200.0, between=299.0)


def test_all_steps_of_a_long_way_back_are_done_again() -> None:
    told = [
        event(100.0, "started", step=0),
        event(405.0, "failed", step=305, phase="forward"),
        event(406.0, "resumed", step=4),
        event(410.0, "finished", step=8),
    ]
    before = rank_steps(1, 304, 100.0, forward=1.0)
    found = goodput(told, [*steps(1, 4, 100.0), *steps(5, 8, 406.0)], {0: before})
    assert found.lost_steps == 200, "as many as are remembered, where none is done again yet"
    found = goodput(
        told, [*steps(1, 4, 100.0), *steps(5, 8, 406.0)], {0: [*before, *rank_steps(5, 8, 406.0, forward=1.0)]}
    )
    assert found.lost_steps == 300
    check(found, progress=8.0, replayed=300.0, restart=2.0)


def test_nothing_is_told_of_a_run_without_a_word() -> None:
    assert goodput([], []) == Goodput(0.0, dict.fromkeys(PARTS, 0.0))
    assert goodput([], [{"step": 1}], {0: []}).share == 0.0
    assert goodput([{"event": "started"}, {"event": "started", "time": "soon"}], []).wall_s == 0.0


def test_metrics_without_times_follow_one_another() -> None:
    lines = [{"step": step, "step_s": 1.0} for step in range(1, 5)]
    check(goodput([event(100.0, "started", step=0), event(105.0, "finished", step=4)], lines), progress=4.0, ending=1.0)


KINDS = (
    "started",
    "resumed",
    "failed",
    "gave_up",
    "rollback",
    "stopped",
    "finished",
    "checkpoint",
    "hang",
    "restarted",
)


@given(st.data())
def test_every_account_adds_up_whatever_the_files_say(data: st.DataObject) -> None:
    time = st.floats(0, 1000)
    told = data.draw(
        st.lists(
            st.builds(
                lambda t, k, s, x: event(t, k, step=s, to=s - 2, seconds=x, stalled_s=x, phase="hooks"),
                time,
                st.sampled_from(KINDS),
                st.integers(0, 20),
                st.floats(0, 50),
            ),
            max_size=12,
        )
    )
    line = st.builds(
        lambda t, s, x: {"step": s, "time": t, "step_s": x, "eval_s": x / 2}, time, st.integers(1, 20), st.floats(0, 50)
    )
    metrics = data.draw(st.lists(line, max_size=12))
    of_rank = st.builds(
        lambda t, s, x, y: {
            "kind": "step",
            "step": s,
            "time": t,
            "seconds": x + y,
            "profiled": True,
            "parts": {"data": x, "communication": y},
        },
        time,
        st.integers(1, 20),
        st.floats(0, 50),
        st.floats(0, 50),
    )
    ranks = data.draw(st.dictionaries(st.integers(0, 3), st.lists(of_rank, max_size=6), max_size=3))
    found = goodput(told, metrics, ranks, data.draw(st.none() | time), data.draw(st.none() | time))
    assert set(found.parts) == set(PARTS)
    assert all(seconds >= -1e-9 for seconds in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, abs=1e-6)
    assert 0 <= found.share <= 1 + 1e-9
