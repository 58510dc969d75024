"""Layouts for thousands of GPUs, built for single ranks in one process: each holds what the closed form says."""

from __future__ import annotations

import pytest

from meshwright.estimate.state import state_bytes
from meshwright.estimate.units import Place
from meshwright.models.presets import preset
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.fake_world import RankState, state_of_rank
from meshwright.verify.pool import RankPool

LAYOUTS = [
    ("gpt3-175b", "dp=32 zero=1 tp=8 pp=4", 1024),
    ("llama3.1-405b", "dp=32 zero=3 replicate=4 tp=8 pp=4 layers=balanced", 1024),
    ("llama3.1-70b", "dp=4 zero=2 tp=8 pp=4 cp=8 schedule=zbv", 1024),
    ("mixtral-8x22b", "dp=64 zero=2 tp=8 pp=8 ep=8 schedule=zero-bubble", 4096),
    ("qwen3-235b-a22b", "dp=64 zero=3 tp=8 pp=8 ep=64", 4096),
    ("qwen3-235b-a22b", "dp=64 zero=1 tp=8 pp=8 ep=16 schedule=interleaved:2", 4096),
]


def built(world: World, name: str, strategy: Strategy, ranks: list[int]) -> list[RankState]:
    return [state_of_rank(preset(name), strategy, rank) for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "world"), LAYOUTS)
def test_ranks_of_large_worlds_hold_what_the_closed_form_says(name: str, text: str, world: int, pool: RankPool) -> None:
    strategy = Strategy.parse(text, world)
    strategy.check(preset(name), world)
    ranks = [0, 1, world // 3, world // 2 + 5, world - 1]
    (found,) = pool.run(built, 1, name, strategy, ranks)
    for rank, state in zip(ranks, found, strict=True):
        expected = state_bytes(preset(name), strategy, Place.of(strategy, rank))
        assert (state.parameters, state.optimizer) == (expected.parameters, expected.optimizer), f"rank {rank}"
