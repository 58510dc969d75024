"""The strategy's short form and its refusals."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.strategy import Strategy


@pytest.mark.parametrize("text", ["auto", "dp=auto", "dp=4"])
def test_short_form_fills_in_what_is_left_open(text: str) -> None:
    assert str(Strategy.parse(text, 4)) == "dp=4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=3", "needs 3 processes and there are 4; start with --nproc 3"),
        ("ddp=4", "unknown key 'ddp' (did you mean 'dp'?)"),
        ("dp=0", "whole number from 1"),
        ("dp=two", "whole number from 1"),
    ],
)
def test_refusal_says_what_to_change(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text, 4)
    assert expected in str(caught.value)


def test_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(ConfigError, match=r"10 is not divisible by 4 .*use 8 or 12"):
        Strategy(dp=4).micro_steps(10, None)
    with pytest.raises(ConfigError, match=r"10 is not divisible by 12 .*use 12"):
        Strategy(dp=4).micro_steps(10, 3)


def test_micro_steps_share_the_batch() -> None:
    assert Strategy(dp=2).micro_steps(16, None) == 1
    assert Strategy(dp=2).micro_steps(16, 2) == 4
