"""Slow ranks: who is slow is named with its phase, noise and waiting name nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.own_time import alone_in, own_seconds
from meshwright.observe.stragglers import PHASES, Sections, Slow, Stragglers, sentence
from meshwright.strategy import Strategy

USUAL = {"data": 0.01, "forward": 0.3, "backward": 0.6, "reduce": 0.02, "optimizer": 0.1}


def window(
    ranks: int, slow: dict[tuple[int, str], float] | None = None, kinds: int = 1, all_slower: float = 1.0
) -> list[Sections]:
    """What ranks tell; the last kind's work takes twice as long as the first one's."""
    told = []
    for rank in range(ranks):
        kind = rank * kinds // ranks
        factor = all_slower * (1 + kind)
        seconds = {phase: usual * factor * (slow or {}).get((rank, phase), 1.0) for phase, usual in USUAL.items()}
        told.append(Sections(rank, seconds, 2.0 * all_slower, f"stage {kind}", "host"))
    return told


def named(judge: Stragglers, *windows: list[Sections]) -> set[tuple[int, str]]:
    for one in windows:
        judge.judge(one)
    return set(judge.slow)


@given(
    st.integers(2, 12),
    st.lists(st.floats(0.9, 1.1), min_size=300, max_size=300),
)
def test_noise_names_nobody(ranks: int, noise: list[float]) -> None:
    judge, draw = Stragglers(), iter(noise)
    for _ in range(4):
        told = [
            Sections(rank, {phase: usual * next(draw) for phase, usual in USUAL.items()}, 1.03) for rank in range(ranks)
        ]
        assert not judge.judge(told).named


@given(st.data())
def test_slow_ranks_are_named_with_their_phases_and_nobody_else_is(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(3, 16))
    # Of one phase fewer than half of the ranks: of more, nobody can say who is the slow one.
    phases = ("forward", "backward", "optimizer")
    slow = {}
    for phase in phases:
        guilty = data.draw(st.sets(st.integers(0, ranks - 1), max_size=(ranks - 1) // 2))
        slow |= {(rank, phase): data.draw(st.floats(3.5, 20.0)) for rank in guilty}
    judge = Stragglers()
    assert named(judge, *[window(ranks, slow)] * 3) == set(slow)
    for key, finding in judge.slow.items():
        assert abs(finding.relative / slow[key] - 1) < 1e-9  # type: ignore[operator]


def test_of_two_ranks_the_slower_one_is_named() -> None:
    assert named(Stragglers(), *[window(2, {(1, "forward"): 3.0})] * 2) == {(1, "forward")}


def test_one_slow_window_names_nobody_and_a_rank_that_recovers_is_cleared() -> None:
    judge, good, bad = Stragglers(), window(4), window(4, {(2, "backward"): 3.0})
    assert not judge.judge(bad).named
    assert not judge.judge(good).named
    (found,) = judge.judge(bad).named
    assert (found.rank, found.phase) == (2, "backward")
    assert not judge.judge(bad).named, "named once"
    assert not judge.judge(good).cleared
    (cleared,) = judge.judge(good).cleared
    assert (cleared.rank, cleared.phase, judge.slow) == (2, "backward", {})


def test_slowness_that_costs_next_to_nothing_names_nobody() -> None:
    assert not named(Stragglers(), *[window(4, {(0, "data"): 5.0})] * 3)


def test_stages_are_compared_with_their_own_kind_only() -> None:
    assert not named(Stragglers(), *[window(4, kinds=2)] * 3), "the second stage does twice the work"
    assert named(Stragglers(), *[window(4, {(2, "forward"): 3.0}, kinds=2)] * 3) == {(2, "forward")}


def test_a_rank_that_is_alone_in_its_stage_is_compared_with_its_own_best() -> None:
    judge = Stragglers()
    slow = {(1, "forward"): 3.0}
    assert not named(judge, *[window(2, kinds=2)] * 3)
    assert named(judge, *[window(2, slow, kinds=2)] * 2) == {(1, "forward")}
    (found,) = judge.slow.values()
    assert found.relative is None
    assert abs(found.own - 3) < 1e-9
    assert "3.0 times its own best" in sentence(found)


def with_work(told: list[Sections], *work: float) -> list[Sections]:
    """The same, where a plan says what passes take."""
    return [replace(one, work={"forward": part, "backward": 2 * part}) for one, part in zip(told, work, strict=True)]


def test_a_stage_that_is_slow_from_the_start_is_named_by_what_a_plan_gives_it() -> None:
    slow = {(1, "forward"): 3.0}
    assert not named(Stragglers(), *[window(2, slow, kinds=2)] * 3), "without a plan nobody knows"
    assert not named(Stragglers(), *[with_work(window(2, kinds=2), 1, 2)] * 3), "the second has twice the work"
    judge = Stragglers()
    assert named(judge, *[with_work(window(2, slow, kinds=2), 1, 2)] * 3) == {(1, "forward")}
    (found,) = judge.slow.values()
    assert (found.relative, found.own) == (None, 1.0)
    assert found.planned == pytest.approx(3)
    assert found.excess_s == pytest.approx(USUAL["forward"] * 2 * 2)
    assert "3.0 times what its stage should take" in sentence(found)
    assert "best" not in sentence(found)


def test_a_plan_that_is_wrong_about_a_stage_by_half_names_nobody() -> None:
    assert not named(Stragglers(), *[with_work(window(2, kinds=2), 1, 1.35)] * 3)


def test_all_ranks_of_a_stage_may_be_slow_together() -> None:
    slow = {(rank, "backward"): 2.5 for rank in (2, 3)}
    assert named(Stragglers(), *[with_work(window(6, slow, kinds=3), 1, 1, 2, 2, 3, 3)] * 3) == set(slow)


def test_a_batch_that_grows_for_everybody_names_nobody() -> None:
    judge = Stragglers()
    assert not named(judge, *[window(2, kinds=2)] * 3, *[window(2, kinds=2, all_slower=4.0)] * 3)


def test_a_phase_that_a_rank_does_not_tell_is_not_judged() -> None:
    told = [Sections(0, {"data": 0.1}, 1.0), Sections(1, {"data": 0.1, "forward": 0.9}, 1.0)]
    assert not named(Stragglers(), told, told, told)
    assert not named(Stragglers(), [], told[:1], told[:1])


def test_a_phase_that_takes_others_no_time_at_all_has_no_factor() -> None:
    told = [Sections(2, {"checkpoint": 0.0}, 1.0), Sections(1, {"checkpoint": 0.9}, 1.0, host="node-7")]
    judge = Stragglers()
    assert named(judge, told, told) == {(1, "checkpoint")}
    assert sentence(judge.slow[1, "checkpoint"]) == "rank 1 on node-7 is slow in checkpoint: 0.9 s a step too long"


def test_all_judged_phases_have_a_name() -> None:
    assert set(USUAL) <= set(PHASES)
    assert sentence(Slow(3, "", "forward", 2.5, 2.4, 0.25)) == (
        "rank 3 is slow in forward: 2.5 times the other ranks, 2.4 times its own best, 0.25 s a step too long"
    )


def test_a_named_rank_does_not_come_and_go_with_the_rest_of_the_step() -> None:
    judge, bad = Stragglers(), {"forward": 0.4}
    told = [Sections(0, {"forward": 0.1}, 2.0), Sections(1, bad, 2.0)]
    assert named(judge, told, told) == {(1, "forward")}
    # The same slowness in steps that take longer.
    longer = [Sections(0, {"forward": 0.1}, 5.0), Sections(1, bad, 5.0)]
    assert named(judge, longer, longer, longer) == {(1, "forward")}
    assert not named(Stragglers(), longer, longer, longer)


def test_own_time_is_known_where_nobody_waits_and_elsewhere_from_profiles() -> None:
    plain = alone_in(Strategy.parse("zero=0", 2))
    assert plain == {"data", "forward", "optimizer"}
    assert alone_in(Strategy.parse("zero=1", 2)) == {"data", "forward"}
    assert alone_in(Strategy.parse("zero=3", 2)) == {"data", "optimizer"}
    assert alone_in(Strategy.parse("tp=2", 2)) == {"data", "optimizer"}
    assert alone_in(Strategy.parse("pp=2", 2)) == {"data"}
    assert alone_in(Strategy.parse("zero=0", 2), counts_targets=True) == {"data", "optimizer"}
    lines = [{"parts": {"data": 1.0, "forward": 2.0, "backward": 9.0}} for _ in range(5)]
    lines[3] = {"parts": {"data": 30.0, "forward": 2.0, "backward": 9.0}}
    assert own_seconds(lines, plain) == {"data": 1.0, "forward": 2.0, "optimizer": 0.0}
    lines.append({"profiled": True, "parts": {"data": 5.0, "forward": 3.0, "backward": 4.0}})
    lines += [{"on_demand": True, "parts": {"data": 1.0, "forward": 50.0, "backward": 90.0}}] * 3
    found = own_seconds(lines, plain)
    assert (found["data"], found["forward"], found["backward"]) == (1.0, 2.0, 4.0)
    assert "checkpoint" not in found
    lines[2]["parts"]["checkpoint"] = 3.0
    assert own_seconds(lines[:6], plain)["checkpoint"] == 0.5
    assert own_seconds([], plain) == {}


def test_the_first_rank_is_not_slow_because_it_commits_what_all_have_saved() -> None:
    told = [Sections(rank, {"checkpoint": 0.9 if rank == 0 else 0.2}, 1.0) for rank in range(4)]
    assert not named(Stragglers(), told, told, told)
    slow = [Sections(rank, {"checkpoint": {0: 0.9, 2: 0.8}.get(rank, 0.2)}, 1.0) for rank in range(4)]
    assert named(Stragglers(), slow, slow, slow) == {(2, "checkpoint")}
