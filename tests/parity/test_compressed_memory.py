"""What compression takes beside gradients is what real ranks allocate, and buckets are those that DDP makes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.cluster.cluster import parse_cluster
from meshwright.comm import compressors
from meshwright.comm.bucket_size import buckets_of
from meshwright.comm.compression import Compression
from meshwright.comm.compressors import Bucket
from meshwright.models.shapes import shapes_of
from meshwright.parallel import buckets
from meshwright.parallel.world import World
from meshwright.planning.compressed_memory import sendings
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Question
from meshwright.strategy import Strategy
from meshwright.verify.live_memory import LiveMemory
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.test_compression import made
from tests.parity.test_planned_peak import DENSE

SHAPES = {
    "matrices": ((768, 256), (256, 768), (256,), (512, 256), (2048, 256)),
    "head": ((4096, 256),),
    "vectors": ((70_000,), (300,)),
}
KINDS = ("fp16", "bf16", "int8", "powersgd:4", "powersgd:32", "topk:0.01", "topk:0.2")


def reduce_counted(world: World, kind: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Most bytes that a sum took on this rank: the least of some, since backends let go of tensors a little later."""
    torch.manual_seed(world.rank)
    one, sizes, peaks = made(kind), [prod(shape) for shape in shapes], []
    for _ in range(4):
        flat = torch.randn(sum(sizes))
        gradients = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        with LiveMemory() as live:
            one(Bucket(flat, gradients, [str(index) for index in range(len(shapes))]))
        peaks.append(live.peak)
    # In the first one what is remembered is made.
    return min(peaks[1:])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_takes_what_plans_say(kind: str, shapes: str, ranks: int, pool: RankPool) -> None:
    planned = Compression.parse(kind).working(SHAPES[shapes], ranks)
    for counted in pool.run(reduce_counted, ranks, kind, SHAPES[shapes]):
        assert planned == pytest.approx(counted, rel=0.05)


def seen_buckets(world: World, bucket_mb: float) -> list[list[int]]:
    """Elements of all that is compressed together, step by step."""
    case = Case(DENSE, "dp=2 compress=bf16", 2, tokens=32, settings={"comm": {"bucket_mb": bucket_mb}})
    step = step_of(world, case)
    found: list[list[int]] = []

    def noted(self: compressors.Compressor, bucket: Bucket) -> None:
        found[-1].append(bucket.flat.numel())
        self.reduce(bucket)

    with patch.object(compressors.Compressor, "__call__", noted):
        for number in range(2):
            found.append([])
            step(number, batch_of(case, number, step.data_rank, step.strategy))
    return found


@pytest.mark.parametrize("bucket_mb", [25.0, 4.0])
def test_buckets_are_those_of_ddp_and_no_larger_in_the_first_step(bucket_mb: float, pool: RankPool) -> None:
    # Cases are of float64.
    dealt = buckets_of(list(shapes_of(DENSE).values()), bucket_mb * 2**20, 8)
    planned = [sum(map(prod, bucket)) for bucket in dealt]
    first, second = pool.run(seen_buckets, 2, bucket_mb)[0]
    assert second == planned
    assert sum(first) == sum(planned)
    assert max(first) == pytest.approx(max(planned), rel=0.05)


class _AtOnce:
    """An executor without a thread: what is counted is what this thread does."""

    def __init__(self, *settings: Any) -> None:
        pass

    def submit(self, work: Callable[..., None], *inputs: Any) -> None:
        work(*inputs)


def peak_of(world: World, text: str, tokens: int) -> int:
    """Most bytes of tensors that were alive at once in some steps of training."""
    at_once: dict[str, dict[str, object]] = {"comm": {"compress_after": 0}}
    case = Case(DENSE, text, 2, precision="float32", micro_steps=1, batch=4, tokens=tokens, settings=at_once)
    with patch.object(buckets, "ThreadPoolExecutor", _AtOnce), LiveMemory() as live:
        step = step_of(world, case)
        for number in range(3):
            step(number, batch_of(case, number, step.data_rank, step.strategy))
        return live.peak


@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "powersgd:4", "topk:0.01"])
def test_planned_peaks_are_those_of_ranks_that_train(kind: str, tokens: int, pool: RankPool) -> None:
    text = "dp=2" if kind == "none" else f"dp=2 compress={kind}"
    question = Question(DENSE, parse_cluster("2xcpu"), tokens, 4, "float32")
    planned = memory_of(question.scenario(Strategy.parse(text, 2), 2)).stages[0].allocated
    for counted in pool.run(peak_of, 2, text, tokens):
        assert planned == pytest.approx(counted, rel=0.05)


def test_layers_that_are_through_hold_nothing_when_a_late_bucket_leaves() -> None:
    scenario = Question(DENSE, parse_cluster("2xh100"), 64, 4).scenario(Strategy.parse("dp=2 compress=int8", 2), 2)
    waiting = [sending.waiting for sending in sendings(scenario)]
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[-1] == 0
    assert sendings(Question(DENSE, parse_cluster("2xh100"), 64, 4).scenario(Strategy.parse("dp=2", 2), 2)) == ()
