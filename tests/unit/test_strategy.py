"""The strategy's short form and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.strategy import Strategy


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("auto", 4, Strategy(replicate=4)),
        ("dp=auto", 4, Strategy(replicate=4)),
        ("dp=4", 4, Strategy(replicate=4)),
        ("replicate=4", 4, Strategy(replicate=4)),
        ("zero=3", 4, Strategy(shard=4, zero=3)),
        ("dp=auto zero=2", 4, Strategy(shard=4, zero=2)),
        ("zero=1 replicate=2", 8, Strategy(replicate=2, shard=4, zero=1)),
        ("zero=3 shard=2", 8, Strategy(replicate=4, shard=2, zero=3)),
        ("zero=3 replicate=2 shard=4", 8, Strategy(replicate=2, shard=4, zero=3)),
        ("dp=8 zero=3 replicate=2 shard=4", 8, Strategy(replicate=2, shard=4, zero=3)),
    ],
)
def test_short_form_fills_in_what_is_left_open(text: str, world: int, expected: Strategy) -> None:
    assert Strategy.parse(text, world) == expected


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 3))
def test_canonical_form_reads_back_as_the_same_strategy(replicate: int, shard: int, zero: int) -> None:
    strategy = Strategy(replicate, shard if zero else 1, zero)
    assert Strategy.parse(str(strategy), strategy.world) == strategy
    assert Strategy.processes(str(strategy)) == strategy.world
    assert hash(strategy) == hash(Strategy.parse(str(strategy), strategy.world))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=3", "needs 3 processes and there are 4; start with --nproc 3"),
        ("ddp=4", "unknown key 'ddp' (did you mean 'dp'?)"),
        ("dp=0", "whole number from 1"),
        ("dp=two", "whole number from 1"),
        ("dp=4 dp=2", "given twice"),
        ("zero=4", "stages are 0, 1, 2 and 3"),
        ("shard=4", "add zero=1, 2 or 3"),
        ("dp=4 zero=3 replicate=3", "dp=4 is not replicate=3 x shard=1"),
        ("dp=4 replicate=2", "dp=4 is not replicate=2 x shard=1"),
        ("zero=3 shard=8", "needs"),
    ],
)
def test_refusal_says_what_to_change(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text, 4)
    assert expected in str(caught.value)


def test_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(ConfigError, match=r"10 is not divisible by 4 .*use 8 or 12"):
        Strategy(replicate=4).micro_steps(10, None)
    with pytest.raises(ConfigError, match=r"10 is not divisible by 12 .*use 12"):
        Strategy(replicate=2, shard=2, zero=3).micro_steps(10, 3)


def test_micro_steps_share_the_batch() -> None:
    assert Strategy(replicate=2).micro_steps(16, None) == 1
    assert Strategy(shard=2, zero=3).micro_steps(16, 2) == 4
