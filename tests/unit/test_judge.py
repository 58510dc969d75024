"""Who holds up the others."""

from __future__ import annotations

from dataclasses import replace

from meshwright.elastic.arrivals import Call, Standing, Word
from meshwright.elastic.judge import Verdict, View, judge
from meshwright.elastic.processes import ProcessState
from meshwright.elastic.stacks import Frame, Stacks
from meshwright.pulse import Beat

WORLD = ("0", (0, 1))
ALIVE = ProcessState("S", 1)


def view(rank: int, age: float, limit: float = 60, phase: str = "backward", state: str = "S", **more: object) -> View:
    beat = Beat(10 + rank, 7, phase, 50, 0.0)
    return View(rank, 10 + rank, ProcessState(state, 1), beat, age, limit, **more)  # type: ignore[arg-type]


def in_call(number: int, done: bool = False, group: tuple[str, tuple[int, ...]] = WORLD) -> Word:
    call = Call(number, "all_reduce", ((4,),), ((4,),), ("Float",), done)
    return Word(0.0, True, {group: Standing(number, number if done else number - 1, {number: call})})


def verdict(views: list[View], words: dict[int, Word], world: int = 2) -> Verdict:
    return judge({view.rank: view for view in views}, words, world=world, floor_s=60, longest_s=600)


def test_ranks_within_their_limits_are_let_be() -> None:
    assert verdict([view(0, 10), view(1, 59)], {}).cause == ""


def test_rank_that_did_not_arrive_is_to_blame_and_not_the_one_that_waits() -> None:
    found = verdict([view(0, 70), view(1, 70, phase="forward")], {0: in_call(42), 1: in_call(41, done=True)})
    assert (found.cause, found.guilty, found.certain) == ("late", (1,), True)


def test_waiting_for_a_long_save_is_no_hang() -> None:
    saving = view(1, 100, limit=600, phase="write")
    found = verdict([view(0, 100), saving], {0: in_call(42), 1: in_call(41, done=True)})
    assert (found.guilty, found.certain) == ((1,), False)
    found = verdict([view(0, 601), replace(saving, age_s=601)], {0: in_call(42), 1: in_call(41, done=True)})
    assert (found.guilty, found.certain) == ((1,), True)


def test_nothing_stands_still_for_longer_than_the_longest_limit() -> None:
    """A rank that enters phase after phase and never comes is found by the one that waits for it."""
    words = {0: in_call(42), 1: in_call(41, done=True)}
    assert not verdict([view(0, 500), view(1, 1)], words).certain
    found = verdict([view(0, 601), view(1, 1)], words)
    assert (found.guilty, found.certain) == ((1,), True)


def test_long_limit_that_was_learned_is_respected_by_those_who_wait() -> None:
    words = {0: in_call(42), 1: in_call(41, done=True)}
    assert not verdict([view(0, 900), view(1, 900, limit=2000, phase="write")], words).certain


def test_rank_whose_stack_moves_is_slow_and_not_stuck() -> None:
    words = {0: in_call(42), 1: in_call(41, done=True)}
    assert not verdict([view(0, 70), view(1, 70, moving=True)], words).certain
    assert verdict([view(0, 700), view(1, 700, moving=True)], words).certain


def test_stopped_rank_is_to_blame_once_it_was_stopped_for_long() -> None:
    words = {0: in_call(42)}
    assert not verdict([view(0, 100), view(1, 100, state="T", halted_s=30)], words).certain
    found = verdict([view(0, 100), view(1, 100, state="T", halted_s=61)], words)
    assert (found.cause, found.guilty, found.certain) == ("stopped", (1,), True)


def test_rank_that_is_gone_is_to_blame_unless_it_had_finished() -> None:
    found = verdict([view(0, 1), view(1, 1, state="Z", halted_s=6)], {})
    assert (found.cause, found.guilty, found.certain) == ("gone", (1,), True)
    assert verdict([view(0, 1), view(1, 1, state="Z", phase="end", halted_s=6)], {}).cause == ""


def test_rank_that_finished_although_others_wait_for_it_is_to_blame() -> None:
    ended = view(1, 61, limit=600, state="gone", phase="end", halted_s=61)
    found = verdict([view(0, 61), ended], {0: in_call(42), 1: in_call(41, done=True)})
    assert (found.guilty, found.certain) == ((1,), True)


def test_ranks_that_disagree_are_found_before_their_limit() -> None:
    other = in_call(42)
    gather = Call(42, "all_gather", ((4,),), ((8,),), ("Float",))
    other.groups[WORLD].calls[42] = gather
    found = verdict([view(0, 61, limit=600), view(1, 61, limit=600)], {0: in_call(42), 1: other})
    assert (found.cause, found.guilty, found.certain) == ("mismatch", (0, 1), True)


def test_circle_is_found_and_all_of_it_is_named() -> None:
    """Rank 1 left out a collective of all ranks and waits for rank 0 in another group."""
    everyone, pair = ("0", (0, 1, 2)), ("7", (0, 1))
    words = {rank: in_call(42, group=everyone) for rank in (0, 2)}
    words[1] = in_call(9, group=pair)
    words[1].groups[everyone] = Standing(41, 41, {41: Call(41, "all_reduce", done=True)})
    words[0].groups[pair] = Standing(8, 8, {8: Call(8, "all_reduce", done=True)})
    found = verdict([view(rank, 70, limit=600) for rank in range(3)], words, world=3)
    assert (found.cause, found.guilty, found.certain) == ("circle", (0, 1), True)
    moving = [view(0, 70, limit=600), view(1, 5, limit=600), view(2, 70, limit=600)]
    assert not verdict(moving, words, world=3).certain or verdict(moving, words, world=3).cause == ""


def test_all_have_arrived_and_nothing_moves() -> None:
    words = {0: in_call(42), 1: in_call(42)}
    found = verdict([view(0, 70), view(1, 70)], words)
    assert (found.cause, found.certain) == ("stalled", True)
    # One of them has only just come.
    assert not verdict([view(0, 70), view(1, 1)], words).certain


def test_stage_of_a_pipeline_says_itself_whom_it_waits_for() -> None:
    waits = view(1, 70)
    assert waits.beat is not None
    waits = replace(waits, beat=replace(waits.beat, waits_for=0))
    found = verdict([view(0, 70), waits], {})
    assert (found.cause, found.guilty) == ("late", (0,))


def test_rank_inside_torch_distributed_waits_although_no_recorder_knows() -> None:
    inside = Stacks((Frame("/x/torch/distributed/distributed_c10d.py", 5, "init_process_group"),))
    found = verdict([view(0, 70, stacks=inside, phase="start"), view(1, 70, phase="start")], {})
    assert (found.cause, found.guilty) == ("late", (1,))


def test_ranks_of_other_machines_are_left_to_their_own_watchdog() -> None:
    words = {rank: in_call(42, group=("0", (0, 1, 2, 3))) for rank in (0, 1)}
    found = verdict([view(0, 70), view(1, 70)], words, world=4)
    assert (found.cause, found.guilty, found.certain, found.unseen) == ("unseen", (), False, (2, 3))
    found = verdict([view(0, 700), view(1, 700)], words, world=4)
    assert (found.cause, found.certain) == ("unseen", True)
    # Ranks that only meet are no circle, as long as somebody elsewhere may be late.
    inside = Stacks((Frame("/x/torch/distributed/distributed_c10d.py", 5, "init_process_group"),))
    meeting = [view(rank, 70, limit=600, stacks=inside, phase="start") for rank in (0, 1)]
    assert verdict(meeting, {}, world=4).cause == ""
