"""Planned peaks of memory are those of the trainer's own step, under every kind of strategy and at every stage."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.config import RunConfig
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.estimate.units import Place
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool
from meshwright.verify.rehearsal import rehearse_step

LENGTH = 1024
DENSE = ModelSpec(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)
SPARSE = DENSE.model_copy(
    update={"experts": preset("tiny-moe").experts.model_copy(update={"num_experts": 8, "moe_intermediate_size": 512})}  # type: ignore[union-attr]
)
CASES = [
    ("dense", "dp=1", 1, 0),
    ("dense", "dp=1", 2, 0),
    ("dense", "dp=1 recompute=full", 1, 0),
    ("dense", "dp=1 recompute=first:4", 2, 0),
    ("dense", "dp=1 recompute=selective", 2, 0),
    ("dense", "dp=8", 1, 0),
    ("dense", "dp=8 zero=1", 2, 0),
    ("dense", "dp=8 zero=2", 1, 0),
    ("dense", "dp=8 zero=3", 2, 0),
    ("dense", "dp=8 zero=3 replicate=2 recompute=full", 2, 0),
    ("dense", "dp=4 zero=1 tp=2", 1, 0),
    ("dense", "dp=4 zero=1 tp=2", 2, 0),
    ("dense", "dp=4 zero=1 tp=2 sp=off", 2, 0),
    ("dense", "dp=4 zero=3 tp=2", 2, 0),
    ("dense", "dp=4 zero=3 cp=2", 2, 0),
    ("dense", "dp=2 zero=1 tp=2 pp=2", 8, 0),
    ("dense", "dp=2 pp=4", 8, 2),
    ("dense", "dp=4 zero=3 pp=2", 8, 0),
    ("dense", "dp=2 pp=4 schedule=interleaved:2", 8, 0),
    ("dense", "dp=2 pp=4 schedule=zero-bubble", 8, 0),
    ("dense", "dp=2 pp=4 schedule=zero-bubble", 8, 5),
    ("dense", "dp=2 pp=4 schedule=zbv", 8, 0),
    ("dense", "dp=1 offload=activations", 1, 0),
    ("dense", "dp=8 zero=3 recompute=full offload=activations", 2, 0),
    ("dense", "dp=4 zero=3 pp=2 offload=activations", 8, 0),
    ("sparse", "dp=8 zero=3 offload=activations", 2, 0),
    ("sparse", "dp=1", 1, 0),
    ("sparse", "dp=8 zero=3", 2, 0),
    ("sparse", "dp=4 zero=1 tp=2", 2, 0),
    ("sparse", "dp=8 ep=4 zero=1", 2, 0),
    ("sparse", "dp=8 ep=8 zero=3", 1, 0),
]


NARROW = [
    ("dense", "dp=1", 1, 0),
    ("dense", "dp=1 recompute=full", 2, 0),
    ("dense", "dp=8 zero=1", 2, 0),
    ("dense", "dp=8 zero=2", 1, 0),
    ("dense", "dp=8 zero=3", 2, 0),
    ("dense", "dp=4 zero=1 tp=2", 2, 0),
    ("dense", "dp=2 zero=1 tp=2 pp=2", 8, 0),
    ("dense", "dp=4 zero=3 pp=2", 8, 0),
    ("sparse", "dp=8 ep=4 zero=1", 2, 0),
]


def peak_of(
    world: World, shape: str, text: str, micro_steps: int, rank: int, kept: Kept = FLOAT32, precision: str = "bf16"
) -> int:
    strategy = Strategy.parse(text, 1 if text.startswith("dp=1") else 8)
    settings = asdict(kept) | {"fp8_smallest": 64}
    config = RunConfig.model_validate({"train": {"precision": precision}, "precision": settings})
    return rehearse_step(
        DENSE if shape == "dense" else SPARSE,
        strategy,
        rank,
        config,
        micro_batch=2,
        sequence_length=LENGTH,
        micro_steps=micro_steps,
    ).peak


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "text", "micro_steps", "rank"), CASES)
def test_planned_peak_is_that_of_the_step(shape: str, text: str, micro_steps: int, rank: int, pool: RankPool) -> None:
    (counted,) = pool.run(peak_of, 1, shape, text, micro_steps, rank)
    assert planned_peak(shape, text, micro_steps, rank, FLOAT32) == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "text", "micro_steps"),
    [
        ("dense", "dp=1", 2),
        ("dense", "dp=1 recompute=selective", 2),
        ("dense", "dp=8 zero=3", 2),
        ("dense", "dp=4 zero=1 tp=2", 2),
        ("sparse", "dp=1", 1),
    ],
)
def test_linears_in_8_bits_keep_what_they_keep_in_bf16(shape: str, text: str, micro_steps: int, pool: RankPool) -> None:
    (counted,) = pool.run(peak_of, 1, shape, text, micro_steps, 0, FLOAT32, "fp8")
    assert planned_peak(shape, text, micro_steps, 0, FLOAT32, "fp8") == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "text", "micro_steps", "rank"), NARROW)
def test_planned_peak_of_narrow_states_is_that_of_the_step(
    shape: str, text: str, micro_steps: int, rank: int, pool: RankPool
) -> None:
    kept = Kept("bf16", "int8")
    (counted,) = pool.run(peak_of, 1, shape, text, micro_steps, rank, kept)
    assert planned_peak(shape, text, micro_steps, rank, kept) == pytest.approx(counted, rel=0.05)


def planned_peak(shape: str, text: str, micro_steps: int, rank: int, kept: Kept, precision: str = "bf16") -> float:
    world = 1 if text.startswith("dp=1") else 8
    strategy = Strategy.parse(text, world)
    spec, batch = DENSE if shape == "dense" else SPARSE, strategy.dp * 2 * micro_steps
    question = Question(spec, parse_cluster(f"{world}xh100"), LENGTH, batch, precision, kept=kept)
    # In the rehearsal experts get equal shares, and nothing is compiled.
    scenario = replace(question.scenario(Layout.of(strategy), 2), imbalance=1.0, compile=False)
    return memory_of(scenario).stages[Place.of(strategy, rank).pp].allocated
