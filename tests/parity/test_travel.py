"""Gradients that travel by our own algorithms or in other buckets give what one process computes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.all_reduce import all_reduce
from meshwright.comm.travel import Travel
from meshwright.errors import ConfigError
from meshwright.parallel import buckets
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("strategy", "ranks"), [("dp=2", 2), ("dp=3", 3), ("dp=4 zero=1", 4), ("dp=2 cp=2", 4)])
def test_every_algorithm_trains_as_one_process_does(algorithm: str, strategy: str, ranks: int, prover: Prover) -> None:
    settings = {"comm": {"allreduce": algorithm, "bucket_mb": 0.02}}
    case = Case(SPECS["gqa"], strategy, ranks, micro_steps=2, batch=24, settings=settings)
    assert prover.differences(case) == []


def reductions(world: World, bucket_mb: float) -> list[int]:
    """Elements of each sum of gradients in a step after DDP has arranged its buckets."""
    settings = {"comm": {"allreduce": "ring", "bucket_mb": bucket_mb}}
    case = Case(SPECS["gqa"], "dp=2", 2, micro_steps=2, settings=settings)
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    seen: list[int] = []

    def noted(tensor: Tensor, *inputs: Any) -> Any:
        seen.append(tensor.numel())
        return all_reduce(tensor, *inputs)

    with patch.object(buckets, "all_reduce", noted):
        step(2, batch_of(case, 2, step.data_rank, step.strategy))
    return seen


def test_the_size_of_buckets_changes_how_often_gradients_travel_and_not_how_many(pool: RankPool) -> None:
    (whole, _), (pieces, _) = (pool.run(reductions, 2, size) for size in (25.0, 0.02))
    assert len(whole) == 1
    assert len(pieces) > 3
    assert sum(pieces) == sum(whole)


@pytest.mark.parametrize("text", ["dp=2 zero=3", "dp=1 tp=2", "dp=1 pp=2", "dp=2 zero=2"])
@pytest.mark.parametrize("travel", [Travel("ring"), Travel(bucket_mb=1.0)])
def test_where_others_carry_gradients_it_is_refused(text: str, travel: Travel) -> None:
    strategy = Strategy.parse(text, 2)
    with pytest.raises(ConfigError, match=r"comm\.(allreduce|bucket_mb)"):
        travel.check(strategy, in_buckets=False)
