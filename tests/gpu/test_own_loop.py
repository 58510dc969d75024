"""Loops of one's own on up to four ranks that share one GPU: what torch alone computes on it."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.verify.pool import RankPool
from tests.parity.own_loops import assert_same, train, train_plainly
from tests.parity.test_own_loop import train_in_fp16

CASES = [
    ("convolutions", "dp=1", 2),
    ("convolutions", "dp=2 shares=3+1", 2),
    ("convolutions", "dp=2 zero=3 recompute=full", 2),
    ("branches", "dp=2", 2),
    ("branches", "dp=2 zero=3", 1),
    ("branches", "dp=2 zero=3 tp=2", 2),
    ("skips", "dp=2 zero=3 wrap=block", 2),
    ("staged", "dp=1 pp=2", 2),
    ("staged", "dp=2 pp=2 zero=3 recompute=full schedule=interleaved:2", 2),
]


@pytest.mark.parametrize(("kind", "strategy", "micro_steps"), CASES)
def test_loop_trains_as_on_one_rank(kind: str, strategy: str, micro_steps: int, pool: RankPool) -> None:
    (expected,) = pool.run(train_plainly, 1, kind, micro_steps)
    for found in pool.run(train, mw.Strategy.fewest_processes(strategy), kind, strategy, micro_steps):
        assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=3"])
def test_overflow_of_fp16_skips_the_step_on_all_ranks_alike(strategy: str, pool: RankPool) -> None:
    """Without a look from the host: the optimizer's kernel takes the flag."""
    (expected,) = pool.run(train_in_fp16, 1, "dp=1")
    for found in pool.run(train_in_fp16, 2, strategy):
        assert [one[1:] for one in found] == [one[1:] for one in expected]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], rel=1e-2)
    assert not expected[0][2]
    assert expected[-1][2]
