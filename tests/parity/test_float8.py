"""fp8 under every kind of strategy computes what one process computes in fp8.

Scales are powers of two, so parts of a matrix are rounded as the whole is, and what differs is the order of sums, as in
bf16; but where that tips a value, it tips it by a sixteenth. With four seeds and dp, tp and cp, losses of five steps
differed by up to 3.4e-2 (bf16: 8.8e-3). A mistake can hide in that; so the same paths are also gone with numbers that
are not rounded, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.config import RunConfig
from meshwright.models import float8
from meshwright.models.float8 import Recipe
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.precision import Float8, Precision
from meshwright.parallel.world import World
from meshwright.training.precision import precision_of
from meshwright.verify.parity import Case, Prover, Trace, batch_of, run_case, step_of
from meshwright.verify.pool import RankPool

_SHAPE = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    # As strong as in a wide model, so that every part of it matters.
    "initializer_range": 0.16,
}
_EXPERTS = Experts(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, num_shared_experts=1, router_aux_loss_coef=0.01
)
DENSE = ModelSpec.model_validate(_SHAPE)
DEEP = ModelSpec.model_validate(_SHAPE | {"num_hidden_layers": 4})
BIASED = ModelSpec.model_validate(_SHAPE | {"bias": ("q", "k", "v", "o", "up", "down"), "tie_word_embeddings": True})
FEW_HEADS = ModelSpec.model_validate(_SHAPE | {"num_key_value_heads": 1})
MIXTURE = ModelSpec.model_validate(_SHAPE | {"experts": _EXPERTS.model_dump()})
TENSORWISE = {"precision": {"fp8_recipe": "tensorwise"}}
WIDE_GRADIENT = {"precision": {"fp8_weight_gradient": False}}

CASES = [
    (DENSE, "dp=2", 2, {}),
    (DENSE, "dp=2 zero=3 recompute=selective", 2, {}),
    (DENSE, "dp=2 zero=3 tp=2", 4, {}),
    (DENSE, "dp=2 zero=2", 2, TENSORWISE),
    (DENSE, "dp=1 tp=2 recompute=selective", 2, TENSORWISE),
    (DENSE, "dp=1 tp=2", 2, WIDE_GRADIENT),
    (BIASED, "dp=1 tp=4 recompute=full", 4, {}),
    (FEW_HEADS, "dp=1 tp=2 sp=off", 2, {}),
    (DENSE, "dp=1 cp=2", 2, {}),
    (DEEP, "dp=1 pp=2 tp=2 schedule=zbv", 4, {}),
    (MIXTURE, "dp=2 zero=3 ep=2", 2, {}),
    (MIXTURE, "dp=1 tp=2", 2, TENSORWISE),
]


def run_unrounded(world: World, case: Case) -> Trace:
    """A case in which linears take the paths of 8 bits with numbers of 64."""

    def precision(config: RunConfig) -> Precision:
        section = config.precision
        recipe = Recipe(section.fp8_recipe, section.fp8_weight_gradient, section.fp8_smallest)
        return replace(precision_of(config), float8=Float8(recipe))

    def keep(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
        return x, torch.ones(())

    def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
        return a[0] @ b[0].t()

    with (
        patch("meshwright.training.step.precision_of", precision),
        patch.object(float8, "cast", keep),
        patch.object(float8, "scaled_mm", multiply),
    ):
        return run_case(world, case)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "strategy", "ranks", "settings"), CASES, ids=lambda value: str(value)[:40])
def test_paths_of_8_bits_compute_what_linears_do(
    spec: ModelSpec, strategy: str, ranks: int, settings: dict[str, dict[str, object]], prover: Prover
) -> None:
    assert prover.differences(Case(spec, strategy, ranks, settings=settings), run=run_unrounded) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "strategy", "ranks", "settings"),
    [CASES[0], CASES[2], CASES[4], CASES[8], CASES[10]],
    ids=lambda value: str(value)[:40],
)
def test_strategies_round_about_as_one_process_does(
    spec: ModelSpec, strategy: str, ranks: int, settings: dict[str, dict[str, object]], prover: Prover
) -> None:
    assert prover.differences(Case(spec, strategy, ranks, "fp8", settings=settings)) == []


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
def test_pipelines_give_the_same_bits(schedule: str, prover: Prover, pool: RankPool) -> None:
    case = Case(DEEP, f"dp=1 pp=2 schedule={schedule}", 2, "fp8")
    expected = prover.reference(case)
    traces = pool.run(run_case, 2, case)
    assert [trace.losses for trace in traces] == [expected.losses] * 2
    weights = {name: value for trace in traces for name, value in trace.weights.items()}
    assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


def products_by_pass(world: World, case: Case) -> tuple[int, dict[str, str]]:
    """How many products in 8 bits a rank does in a step, and what is not multiplied so."""
    step, counted = step_of(world, case), 0

    def count(*inputs: object, **options: object) -> torch.Tensor:
        nonlocal counted
        counted += 1
        return plain(*inputs, **options)

    plain, float8.scaled_mm = float8.scaled_mm, count
    try:
        step(0, batch_of(case, 0, step.data_rank, step.strategy))
    finally:
        float8.scaled_mm = plain
    return counted, dict(step.parallel.wide)


@pytest.mark.parametrize(
    ("strategy", "linears"),
    [
        ("dp=1 tp=2", 14),
        ("dp=2 zero=3", 14),
        # Every stage has a layer.
        ("dp=1 pp=2", 7),
        ("dp=1 pp=2 schedule=zero-bubble", 7),
    ],
)
def test_every_linear_of_a_layer_multiplies_thrice_in_8_bits(strategy: str, linears: int, pool: RankPool) -> None:
    case = Case(DENSE, strategy, 2, "fp8", micro_steps=2)
    for counted, wide in pool.run(products_by_pass, 2, case):
        assert counted == 3 * linears * case.micro_steps
        assert wide.keys() <= {"lm_head"}


def test_parts_that_are_too_small_are_named_on_every_rank(pool: RankPool) -> None:
    case = Case(DENSE, "dp=1 tp=2", 2, "fp8", settings={"precision": {"fp8_smallest": 64}})
    heads = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "kv"}
    for counted, wide in pool.run(products_by_pass, 2, case):
        assert wide.pop("lm_head").endswith("precision.fp8_skip")
        assert wide == dict.fromkeys(heads, "32 x 64: smaller than 64")
        assert counted == 3 * 10 * case.micro_steps
