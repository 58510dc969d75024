"""Expert parallel computes what one process computes: with ZeRO, copies, tensor parallel, recompute and every router.

Float64 cases compare losses and gradient norms to 1e-9 and all final weights, after three steps of AdamW with clipping
and accumulation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.models.generate import generate
from meshwright.models.initialize import build
from meshwright.models.mixture import mixtures
from meshwright.models.parts import whole
from meshwright.models.spec import ModelSpec
from meshwright.parallel import experts
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS
from tests.parity.test_parallelize import first_gradients
from tests.parity.test_train import Run, assert_same_run, run  # noqa: F401


def routed(shape: str = "gqa", **facts: object) -> ModelSpec:
    """A shape whose second layer is a mixture with those facts."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "first_k_dense_replace": 1}
    return ModelSpec.model_validate(SPECS[shape].model_dump() | {"experts": fields | facts})


ROUTERS = {
    "all": routed(num_shared_experts=1, router_aux_loss_coef=0.1, router_bias_update_rate=0.01, router_z_loss_coef=0.1),
    "plain": routed(first_k_dense_replace=0),
    "not rescaled": routed(norm_topk_prob=False, num_experts_per_tok=3, router_z_loss_coef=0.1),
    # Three experts on each of two ranks cannot be sharded evenly, and on four ranks with copies not at all.
    "six": routed(num_experts=6, router_aux_loss_coef=0.1, num_shared_experts=2),
    "capacity": routed(capacity_factor=1.0, router_aux_loss_coef=0.1),
    "little room": routed(capacity_factor=0.3, num_experts_per_tok=1, router_bias_update_rate=0.01),
    "ungated": routed("gpt", num_experts=8, first_k_dense_replace=0, router_z_loss_coef=0.1),
}

FLOAT64 = [
    ("all", "dp=2 ep=2"),
    ("plain", "dp=4 ep=2"),
    ("all", "dp=4 ep=4"),
    ("ungated", "dp=8 ep=4"),
    ("six", "dp=2 zero=1 ep=2"),
    ("all", "dp=4 zero=1 ep=2"),
    ("capacity", "dp=4 zero=1 replicate=2 ep=4"),
    ("not rescaled", "dp=2 zero=2 ep=2"),
    ("six", "dp=4 zero=2 ep=2"),
    ("all", "dp=8 zero=2 replicate=4 ep=4"),
    ("plain", "dp=2 zero=3 ep=2"),
    ("six", "dp=4 zero=3 ep=2 wrap=block"),
    ("all", "dp=4 zero=3 ep=4"),
    ("ungated", "dp=4 zero=3 replicate=2 ep=2 wrap=name:self_attn+mlp+experts"),
    ("all", "dp=8 zero=3 replicate=2 ep=2"),
    ("all", "dp=2 tp=2 ep=2"),
    ("not rescaled", "dp=2 tp=2 sp=off ep=2"),
    ("six", "dp=4 zero=1 tp=2 ep=2"),
    ("capacity", "dp=2 zero=2 tp=2 ep=2"),
    ("all", "dp=4 zero=3 tp=2 sp=off ep=2"),
    ("plain", "dp=2 ep=2 recompute=full"),
    ("all", "dp=4 zero=3 ep=2 recompute=selective"),
    ("ungated", "dp=2 zero=3 tp=2 ep=2 recompute=full"),
    ("all", "dp=2 tp=2 ep=2 recompute=selective"),
    ("capacity", "dp=2 zero=2 ep=2 recompute=first:1"),
    ("little room", "dp=4 zero=3 ep=4"),
    ("little room", "dp=2 ep=2 recompute=full"),
    ("all", "dp=2 ep=2 offload=optimizer"),
    ("six", "dp=4 zero=1 ep=2 offload=optimizer"),
    ("plain", "dp=4 zero=3 ep=2 offload=parameters"),
]


def case_of(router: str, strategy: str, precision: str = "float64") -> Case:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    return Case(ROUTERS[router], strategy, ranks, precision, batch=16)


@pytest.mark.slow
@pytest.mark.parametrize(("router", "strategy"), FLOAT64)
def test_float64_equals_one_process(router: str, strategy: str, prover: Prover) -> None:
    assert prover.differences(case_of(router, strategy)) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("router", "strategy"),
    [("all", "dp=2 ep=2"), ("six", "dp=4 zero=3 ep=2"), ("plain", "dp=2 zero=1 tp=2 ep=2 recompute=selective")],
)
def test_narrow_precision_equals_one_process(router: str, strategy: str, precision: str, prover: Prover) -> None:
    assert prover.differences(case_of(router, strategy, precision)) == []


def send_all_to_one_expert(world: World, case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics and final weights of a training whose tokens all choose the last expert."""
    step = step_of(world, case)
    for mixture in mixtures(step.model):
        mixture.expert_bias[-1] = 9.0
    metrics = [step(number, batch_of(case, number, step.data_rank, step.strategy)) for number in range(case.steps)]
    for those in metrics:
        # Of one replica, so it depends on how many there are.
        del those["loss_max"]
    return metrics, {name: whole(value.detach()).clone() for name, value in step.model.named_parameters()}


@pytest.mark.parametrize("strategy", ["dp=4 ep=2", "dp=4 ep=4 recompute=full", "dp=4 zero=3 ep=2", "dp=2 tp=2 ep=2"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_experts_without_any_token_take_part(strategy: str, capacity: float | None, pool: RankPool) -> None:
    spec = routed(num_experts_per_tok=1, capacity_factor=capacity, router_aux_loss_coef=0.1)
    case = Case(spec, strategy, 4, steps=3)
    ((expected, weights),) = pool.run(send_all_to_one_expert, 1, Case(spec, "auto", 1, steps=3))
    for metrics, found in pool.run(send_all_to_one_expert, 4, case):
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
            assert ours["expert_load_max"] == 4.0
            # Room for ceil(0.5 x 16 tokens / 4 experts) = 2 of a sequence's 16 tokens.
            assert ours.get("dropped") == (None if capacity is None else pytest.approx(14 / 16))
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("strategy", ["ep=2", "ep=4", "zero=3 ep=2", "zero=2 replicate=2 ep=4", "tp=2 ep=2"])
def test_gradients_of_experts_have_the_factor_of_all_others(strategy: str, reduction: str, pool: RankPool) -> None:
    (expected,) = pool.run(first_gradients, 1, "dp=1", "mean")
    for found in pool.run(first_gradients, 4, strategy, reduction):
        assert found == pytest.approx(expected, rel=1e-9)


def evaluate_unevenly(world: World, case: Case) -> tuple[float, list[int]]:
    """The loss of five sequences, of which ranks have different numbers, and a text that all ranks write."""
    step = step_of(world, case)
    step.model.eval()
    tokens = batch_of(case, 0, 0, Strategy())["tokens"].flatten(0, 1)[:5]
    mine = tokens if world.size == 1 else tokens.split([2, 1, 1, 1])[world.rank]
    loss, count = step.sum(step.evaluate(mine)).tolist()
    return loss / count, list(generate(step.model, [1, 2, 3], 6, temperature=0))


@pytest.mark.parametrize("strategy", ["dp=4 ep=2", "dp=4 zero=3 ep=4"])
def test_evaluation_and_generation_take_any_number_of_tokens(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(evaluate_unevenly, 1, Case(ROUTERS["all"], "auto", 1))
    for found in pool.run(evaluate_unevenly, 4, Case(ROUTERS["all"], strategy, 4)):
        assert found == (pytest.approx(expected[0], rel=1e-9), expected[1])


def pass_through_a_layer(world: World, strategy: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of one layer, to which ranks send 3, 0, 1 and 1 tokens: outputs, gradients of inputs and of weights."""
    model = build(ROUTERS["plain"], seed=2, dtype=torch.float64)
    layer, split = next(mixtures(model)), make_mesh(Strategy.parse(strategy, world.size), "cpu").experts
    if split is not None:
        experts.apply(model, split, "sum")
    x = torch.randn(5, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = (x if split is None else x.split([3, 0, 1, 1])[world.rank]).requires_grad_()
    y = layer(mine)
    y.square().sum().backward()
    assert mine.grad is not None
    assert layer.experts.up_proj.grad is not None
    return y.detach(), mine.grad, whole(layer.experts.up_proj.grad)


def test_rank_without_a_token_takes_part(pool: RankPool) -> None:
    (y, x_grad, gradient) = pool.run(pass_through_a_layer, 4, "dp=4")[0]
    found = pool.run(pass_through_a_layer, 4, "dp=4 ep=4")
    torch.testing.assert_close(torch.cat([part for part, _, _ in found]), y)
    torch.testing.assert_close(torch.cat([part for _, part, _ in found]), x_grad)
    for _, _, ours in found:
        torch.testing.assert_close(ours, gradient)


@pytest.mark.slow
def test_checkpoint_of_dealt_out_experts_goes_on_under_other_strategies(run: Run, tmp_path: Path) -> None:  # noqa: F811
    mixture = ["model.preset=tiny-moe", "model.spec.num_hidden_layers=2", "model.spec.experts.num_experts=6"]
    mixture += ["model.spec.experts.router_bias_update_rate=0.01", "train.schedule=constant"]
    whole_run = run("whole", 1, *mixture, "train.steps=6")
    run("parts", 4, *mixture, "train.steps=1", "parallel.strategy=zero=1 ep=2")
    run("parts", 4, *mixture, "train.steps=2", "parallel.strategy=zero=3 ep=2")
    run("parts", 2, *mixture, "train.steps=3", "parallel.strategy=zero=2")
    run("parts", 4, *mixture, "train.steps=4", "parallel.strategy=zero=1 tp=2 ep=2")
    run("parts", 4, *mixture, "train.steps=5", "parallel.strategy=zero=3 tp=2 ep=2 offload=optimizer")
    assert_same_run(whole_run, run("parts", 1, *mixture, "train.steps=6"))
