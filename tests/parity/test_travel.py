"""Gradients that travel by our own algorithms or in other buckets give what one process computes."""

from __future__ import annotations

from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm import sums
from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.all_reduce import all_reduce
from meshwright.comm.travel import Travel
from meshwright.errors import ConfigError
from meshwright.models.shapes import shapes_of
from meshwright.parallel import parallelize
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.collectives import RecordCollectives
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

    with patch.object(sums, "all_reduce", noted):
        step(2, batch_of(case, 2, step.data_rank, step.strategy))
    return seen


def test_the_size_of_buckets_changes_how_often_gradients_travel_and_not_how_many(pool: RankPool) -> None:
    (whole, _), (pieces, _) = (pool.run(reductions, 2, size) for size in (25.0, 0.02))
    assert len(whole) == 1
    assert len(pieces) > 3
    assert sum(pieces) == sum(whole)


@pytest.mark.parametrize("text", ["dp=2 zero=3", "dp=1 tp=2", "dp=1 pp=2", "dp=2 zero=2"])
def test_algorithms_are_refused_where_others_carry_gradients(text: str) -> None:
    with pytest.raises(ConfigError, match=r"comm\.allreduce=ring .*leave it out"):
        Travel("ring").check(Strategy.parse(text, 2))


@pytest.mark.parametrize("text", ["dp=2 zero=3", "dp=2 zero=2 wrap=block"])
def test_sizes_are_refused_where_something_else_says_them(text: str) -> None:
    with pytest.raises(ConfigError, match=r"comm\.bucket_mb=1.0 .*wrap="):
        Travel(bucket_mb=1.0).check(Strategy.parse(text, 2))


@pytest.mark.parametrize("kind", ["int8", "topk:0.01"])
def test_algorithms_are_refused_with_compression_that_sums_nothing(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"compress={kind} exchanges codes"):
        Travel("ring").check(Strategy.parse(f"dp=2 compress={kind}", 2))
    Travel("ring").check(Strategy.parse("dp=2 compress=powersgd:4", 2))


def carried(world: World, strategy: str, bucket_mb: float | str | None) -> tuple[int, int, float | str | None]:
    """How many sums of gradients a step does, of how many bytes together, in buckets of what size."""
    case = Case(
        SPECS["gqa"].model_copy(update={"num_hidden_layers": 6}),
        strategy,
        world.size,
        "float32",
        settings={"comm": {"bucket_mb": bucket_mb}},
    )
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    with RecordCollectives() as seen:
        step(2, batch_of(case, 2, step.data_rank, step.strategy))
    kind = "reduce_scatter" if step.strategy.zero == 2 else "all_reduce"
    assert step.mesh is not None
    data = " ".join(map(str, dist.get_process_group_ranks(step.mesh.loss.get_group())))
    travel = step.parallel.travel
    return seen.traffic.counts[kind, data], seen.traffic.bytes[kind, data], travel.bucket_mb


@pytest.mark.parametrize(("strategy", "ranks"), [("dp=2", 2), ("dp=2 zero=1", 2), ("dp=2 zero=2", 2), ("dp=2 tp=2", 4)])
def test_the_size_of_buckets_holds_for_all_that_sums_whole_gradients(strategy: str, ranks: int, pool: RankPool) -> None:
    (few, whole, _), *_ = pool.run(carried, ranks, strategy, 1.0)
    (many, pieces, _), *_ = pool.run(carried, ranks, strategy, 0.02)
    assert many >= few + 3
    # Shards of odd sizes are padded, each bucket by itself.
    assert abs(pieces - whole) < 0.01 * whole
    (between, _, _), *_ = pool.run(carried, ranks, strategy, 0.1)
    assert few < between < many


@pytest.mark.parametrize(("strategy", "ranks"), [("dp=2 zero=2", 2), ("dp=2 tp=2", 4), ("dp=2 tp=2 zero=2", 4)])
def test_buckets_hold_what_a_rank_has_of_layers(strategy: str, ranks: int, pool: RankPool) -> None:
    """Between one and two layers as a rank has them make a bucket of two, whatever the whole layers would make."""
    spec = SPECS["gqa"].model_copy(update={"num_hidden_layers": 6})
    split = Strategy.parse(strategy, ranks)
    held = sum(prod(shape) for name, shape in shapes_of(spec).items() if name.startswith("model.layers.0."))
    layer_mb = 4 * held / split.tp / 2**20
    (counted, _, _), *_ = pool.run(carried, ranks, strategy, 1.5 * layer_mb)
    (single, _, _), *_ = pool.run(carried, ranks, strategy, 0.9 * layer_mb)
    # Three buckets of two layers instead of six, with zero=2 in both micro-steps.
    assert single - counted == 3 * (2 if split.zero == 2 else 1)


def test_a_size_is_measured_for_the_gradients_that_a_rank_has(pool: RankPool) -> None:
    whole, split = (pool.run(measured_for, 4, text)[0] for text in ("dp=4", "dp=2 tp=2"))
    assert 0.5 * whole <= split < 0.6 * whole


def measured_for(world: World, strategy: str) -> int:
    """Bytes of gradients for which the size of buckets is chosen."""
    asked: list[int] = []

    def noted(group: dist.ProcessGroup, gradient_bytes: int, device: torch.device) -> float:
        asked.append(gradient_bytes)
        return 1.0

    with patch.object(parallelize, "measured_bucket_mb", noted):
        step_of(world, Case(SPECS["gqa"], strategy, world.size, "float32", settings={"comm": {"bucket_mb": "auto"}}))
    return asked[0]


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=2"])
def test_a_measured_size_is_the_same_on_all_ranks_and_trains_as_one_process_does(
    strategy: str, pool: RankPool, prover: Prover
) -> None:
    sizes = {size for _, _, size in pool.run(carried, 2, strategy, "auto")}
    assert len(sizes) == 1
    assert isinstance(sizes.pop(), float)
    case = Case(SPECS["gqa"], strategy, 2, settings={"comm": {"bucket_mb": "auto"}})
    assert prover.differences(case) == []
