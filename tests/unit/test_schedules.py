"""Pipeline schedules: complete, free of deadlock, as short as their theory says, within their memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules import (
    Action,
    Program,
    Transfer,
    dependencies,
    make_program,
    simulate,
    splits_backward,
    stages_per_rank,
)

SCHEDULES = ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "zero-bubble", "zbv"]
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def cost(action: Action) -> float:
    """A backward pass takes twice as long as a forward pass, half of it for each part."""
    return UNITS[action.kind]


def gap(program: Program) -> float:
    """How much longer a step takes than its work, in passes through one rank's layers."""
    chunks = stages_per_rank(program.name)
    return simulate(program, cost).length / chunks - 3 * program.micro_batches


programs = st.builds(make_program, st.sampled_from(SCHEDULES), st.integers(1, 7), st.integers(1, 20))


@given(programs)
def test_every_pass_of_every_micro_batch_runs_once_on_the_rank_of_its_stage(program: Program) -> None:
    kinds = "FIW" if splits_backward(program.name) else "FB"
    expected = {
        Action(kind, stage, micro)  # type: ignore[arg-type]
        for kind in kinds
        for stage in range(program.stages)
        for micro in range(program.micro_batches)
    }
    counted = Counter(action for actions in program.order for action in actions)
    assert counted == Counter(expected)
    for rank, actions in enumerate(program.order):
        assert all(program.placement[action.stage] == rank for action in actions)


@given(programs)
def test_nothing_runs_before_what_it_needs_and_no_rank_waits_for_ever(program: Program) -> None:
    timeline = simulate(program, cost, [0.25] * program.ranks)
    spans = {action: (start, end) for spans in timeline.spans for action, start, end in spans}
    for action, (start, _) in spans.items():
        for needed in dependencies(action, program.stages - 1, splits_backward(program.name)):
            apart = program.placement[needed.stage] != program.placement[action.stage]
            assert start >= spans[needed][1] + (0.25 if apart else 0.0)


@given(programs)
@settings(max_examples=60)
def test_ranks_that_send_and_receive_strictly_in_order_never_block_each_other(program: Program) -> None:
    """A link that takes one message at a time, both ends of which must have come to it: the strictest transport."""
    lists = [program.with_transfers(rank) for rank in range(program.ranks)]
    places = [0] * program.ranks
    sent: set[Transfer] = set()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(lists):
            while places[rank] < len(steps):
                step = steps[places[rank]]
                if isinstance(step, Transfer) and step not in sent:
                    other = step.target if step.source == rank else step.source
                    theirs = lists[other][places[other]] if places[other] < len(lists[other]) else None
                    if theirs != step:
                        break
                    sent.add(step)
                places[rank] += 1
                moved = True
    assert places == [len(steps) for steps in lists]


@given(programs)
@settings(max_examples=60)
def test_what_travels_is_sent_after_it_is_made_and_received_before_it_is_used(program: Program) -> None:
    for rank in range(program.ranks):
        seen: set[Action | Transfer] = set()
        for step in program.with_transfers(rank):
            if isinstance(step, Transfer) and step.source == rank:
                kinds = "F" if step.kind == "forward" else "IB"
                assert any(Action(kind, step.stage, step.micro) in seen for kind in kinds)  # type: ignore[arg-type]
            elif isinstance(step, Action) and step.kind != "W":
                source = step.stage - 1 if step.kind == "F" else step.stage + 1
                if source in range(program.stages) and program.placement[source] != rank:
                    kind = "forward" if step.kind == "F" else "backward"
                    assert Transfer(kind, source, step.micro, program.placement[source], rank) in seen  # type: ignore[arg-type]
            seen.add(step)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_gaps_are_those_of_the_theory(ranks: int, rounds: int) -> None:
    count = rounds * ranks
    assert gap(make_program("gpipe", ranks, count)) == 3 * (ranks - 1)
    assert gap(make_program("1f1b", ranks, count)) == 3 * (ranks - 1)
    assert gap(make_program("interleaved:2", ranks, count)) == pytest.approx(3 * (ranks - 1) / 2)
    assert gap(make_program("interleaved:3", ranks, count)) == pytest.approx(ranks - 1)
    assert gap(make_program("zero-bubble", ranks, count)) == ranks - 1
    assert (ranks - 1) / 2 <= gap(make_program("zbv", ranks, count)) <= ranks / 2


def most_in_flight(program: Program, rank: int) -> int:
    """The most micro-batches whose activations a rank holds at once, counted in stages."""
    held = most = 0
    for action in program.order[rank]:
        held += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, held)
    return most


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_in_flight(ranks: int) -> None:
    count = 4 * ranks
    for rank in range(ranks):
        assert most_in_flight(make_program("gpipe", ranks, count), rank) == count
        assert most_in_flight(make_program("1f1b", ranks, count), rank) == ranks - rank
        assert most_in_flight(make_program("zero-bubble", ranks, count), rank) == ranks
        assert most_in_flight(make_program("zbv", ranks, count), rank) <= 2 * ranks


def test_idle_share_is_what_is_left_of_the_time() -> None:
    timeline = simulate(make_program("1f1b", 4, 12), cost)
    assert timeline.length == 45
    assert [timeline.idle_share(rank) for rank in range(4)] == [pytest.approx(9 / 45)] * 4
