"""Whatever ranks are left, the strategy for them is legal, near to what was asked, and always the same."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as draw

from meshwright.errors import ConfigError
from meshwright.models.presets import preset
from meshwright.planning.replan import replan
from meshwright.strategy import Strategy

DEEP = preset("tiny")
MIXTURE = preset("tiny-moe")


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("auto", 4, "dp=4"),
        ("auto", 3, "dp=2"),  # A batch of 8 is not shared by three.
        ("zero=3", 4, "dp=4 zero=3"),
        ("zero=3", 2, "dp=2 zero=3"),
        ("tp=2", 4, "dp=2 tp=2"),
        ("tp=2", 3, "dp=1 tp=2"),
        ("tp=2", 1, "dp=1"),
        ("dp=4", 8, "dp=4"),
        ("dp=8 zero=3 replicate=2", 4, "dp=4 zero=3"),  # Four ranks still share a copy: each holds what it held.
        ("zero=2 replicate=2", 4, "dp=4 zero=2 replicate=2"),
        ("dp=2 shares=3+1", 2, "dp=2 shares=3+1"),
        ("dp=4 shares=3+1", 2, "dp=2"),  # Nobody knows which of the four are left.
        ("shares=3+1", 4, "dp=4 shares=3+1"),
        ("shares=3+1", 1, "dp=1"),
        ("pp=2 tp=2", 6, "dp=1 tp=2 pp=2"),
        ("pp=2 tp=2", 3, "dp=1 tp=2"),
        ("dp=2 pp=4 layers=1+2+3+2", 4, "dp=1 pp=4 layers=1+2+3+2"),
        ("dp=2 pp=4 layers=1+2+3+2", 2, "dp=1 pp=2"),
        ("dp=2 zero=3 offload=parameters", 1, "dp=1 zero=3 offload=optimizer"),
    ],
)
def test_nearest_strategy(text: str, world: int, expected: str) -> None:
    found = replan(text, DEEP, world, [8], sequence_length=32)
    assert str(found.strategy) == expected


def test_what_changed_is_said() -> None:
    assert replan("dp=2 tp=2", DEEP, 4, [8]).change is None
    assert replan("tp=2", DEEP, 8, [8]).change is None
    assert replan("dp=4", DEEP, 3, [8]).change == (
        "dp=2 on 3 ranks: dp 4 -> 2, replicate 4 -> 2; "
        "1 of 3 ranks stay idle, since they cannot share the batch or the model evenly"
    )


def test_what_no_number_of_ranks_can_do_is_refused_with_its_own_reason() -> None:
    with pytest.raises(ConfigError, match="a global batch of 6 is not divisible by 4"):
        replan("auto", DEEP, 2, [6], micro_batch=4)


DEGREES = ("dp=2", "dp=4", "zero=1", "zero=3", "replicate=2", "shard=2", "tp=2", "tp=4", "pp=2", "pp=4", "cp=2", "cp=4")
OTHERS = ("ep=2", "ep=4", "schedule=interleaved:2", "layers=balanced", "cp_method=ulysses", "sp=off", "recompute=full")
WORDS = (*DEGREES, *OTHERS, "offload=optimizer", "offload=parameters", "wrap=block")


@given(
    text=draw.builds(
        " ".join,
        draw.lists(
            draw.sampled_from(WORDS),
            unique_by=lambda word: word.split("=")[0],
        ),
    ),
    world=draw.integers(1, 24),
    batches=draw.lists(draw.sampled_from([4, 8, 12, 48]), min_size=1),
    micro_batch=draw.sampled_from([None, 1, 2]),
)
def test_result_is_legal_and_near(text: str, world: int, batches: list[int], micro_batch: int | None) -> None:
    try:
        asked = Strategy.parse(text, Strategy.fewest_processes(text))
        spec = MIXTURE if asked.ep > 1 else DEEP
        asked.check(spec, asked.world, 32)
        for size in batches:
            asked.micro_steps(size, micro_batch)
    except ConfigError:
        assume(False)
    arguments = {"micro_batch": micro_batch, "sequence_length": 32}
    found = replan(text, spec, world, batches, **arguments)
    strategy = found.strategy
    assert strategy.world <= world
    strategy.check(spec, strategy.world, 32)
    assert all(strategy.micro_steps(size, micro_batch) >= 1 for size in batches)
    # The short form is what ranks are given.
    assert Strategy.parse(str(strategy), strategy.world) == strategy
    assert replan(text, spec, world, list(reversed(batches)), **arguments) == found
    copy = asked.tp * asked.cp * asked.pp
    if copy <= world and asked.ep == 1 and not (asked.offload == "parameters" and world < 2 * copy // asked.cp):
        assert (strategy.tp, strategy.cp, strategy.pp) == (asked.tp, asked.cp, asked.pp), "one copy would have fitted"
