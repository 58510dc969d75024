"""Pipelines compute what one process computes: every schedule, alone and with what else splits a model."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.generate import generate
from meshwright.models.initialize import build
from meshwright.models.parts import whole
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.loss import cross_entropy
from meshwright.verify.parity import Case, Prover, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

DEEP = {name: spec.model_copy(update={"num_hidden_layers": 4}) for name, spec in SPECS.items()}
SCHEDULES = ["gpipe", "1f1b", "interleaved:2", "zero-bubble", "zbv"]


def prove(prover: Prover, shape: str, strategy: str, micro_steps: int = 4, precision: str = "float64") -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    case = Case(DEEP[shape], strategy, ranks, precision, micro_steps=micro_steps, batch=24 if micro_steps == 3 else 8)
    assert prover.differences(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 3, 8])
@pytest.mark.parametrize(("schedule", "shape"), list(zip(SCHEDULES, cycle(["tied", "gqa", "gpt"]), strict=False)))
def test_every_schedule_with_fewer_and_more_micro_batches_than_stages(
    schedule: str, shape: str, micro_steps: int, prover: Prover
) -> None:
    prove(prover, shape, f"dp=1 pp=2 schedule={schedule}", micro_steps)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_one_layer_a_stage(schedule: str, prover: Prover) -> None:
    prove(prover, "tied", f"dp=1 pp=4 schedule={schedule}", 8)


COMBINED = [
    ("tied", "dp=2 pp=2"),
    ("gqa", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("tied", "dp=2 pp=2 zero=2 schedule=zbv"),
    ("gpt", "dp=2 pp=2 zero=2 wrap=block schedule=zero-bubble"),
    ("few-kv", "dp=2 pp=2 zero=3 wrap=block"),
    ("gqa", "dp=2 pp=2 zero=3 wrap=block schedule=interleaved:2"),
    ("tied", "dp=4 pp=2 zero=2 replicate=2"),
    ("experts", "dp=2 pp=2 zero=3 schedule=gpipe"),
    ("experts", "dp=1 pp=2 tp=2 schedule=zero-bubble"),
    ("gpt", "dp=1 pp=2 tp=2 schedule=zbv"),
    ("tied", "dp=1 pp=2 tp=2 sp=off"),
    ("few-kv", "dp=1 pp=2 tp=4 schedule=interleaved:2"),
    ("tied", "dp=2 pp=2 tp=2 zero=1"),
    ("gqa", "dp=2 pp=2 tp=2 zero=3"),
    ("experts", "dp=2 pp=2 tp=2 zero=2 schedule=zbv"),
    ("gpt", "dp=1 pp=4 recompute=full"),
    ("gqa", "dp=1 pp=2 recompute=full schedule=zero-bubble"),
    ("experts", "dp=1 pp=2 recompute=full schedule=zbv"),
    ("tied", "dp=1 pp=2 recompute=first:3 schedule=interleaved:2"),
    ("experts", "dp=1 pp=2 recompute=selective"),
    ("gpt", "dp=1 pp=2 recompute=selective schedule=zero-bubble"),
    ("gqa", "dp=1 pp=2 layers=3+1"),
    ("tied", "dp=1 pp=2 layers=1+1+1+1 schedule=zbv"),
    ("gqa", "dp=1 pp=2 layers=balanced"),
    ("tied", "dp=2 pp=2 offload=optimizer"),
    ("gqa", "dp=2 pp=2 zero=2 offload=parameters"),
    ("gqa", "dp=2 pp=2 zero=3 wrap=name:embed_tokens+self_attn+lm_head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), COMBINED)
def test_combined_with_what_else_splits_a_model(shape: str, strategy: str, prover: Prover) -> None:
    prove(prover, shape, strategy, 2 if "dp=4" in strategy else 4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "strategy"), [("tied", "dp=2 pp=2 zero=2 schedule=zbv"), ("gqa", "dp=1 pp=2 tp=2 recompute=full")]
)
def test_narrow_precision(shape: str, strategy: str, precision: str, prover: Prover) -> None:
    prove(prover, shape, strategy, 4, precision)


def continued(world: World, case: Case) -> list[int]:
    """What a trained model goes on to write, the same on every rank."""
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    tokens = list(generate(step.model, [3, 1, 4, 1, 5], 12, temperature=0.0, predict=step.parallel.predict))
    if world.size > 1:
        first = torch.tensor(tokens)
        dist.broadcast(first, src=0)
        assert first.tolist() == tokens
    return tokens


@pytest.mark.parametrize("strategy", ["dp=1 pp=2", "dp=1 pp=2 tp=2 schedule=zbv", "dp=2 pp=2 zero=3"])
def test_generation_through_a_pipeline(strategy: str, pool: RankPool) -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    (alone,) = pool.run(continued, 1, Case(DEEP["tied"], "auto", 1, micro_steps=4))
    assert pool.run(continued, ranks, Case(DEEP["tied"], strategy, ranks, micro_steps=4))[0] == alone


def evaluated(world: World, case: Case) -> list[float]:
    step = step_of(world, case)
    rows = batch_of(case, 0, step.data_rank, step.strategy)["tokens"][0]
    step.model.eval()
    return step.sum(step.evaluate(rows)).tolist()


@pytest.mark.parametrize("strategy", ["dp=1 pp=2 schedule=interleaved:2", "dp=2 pp=2 zero=2 schedule=zbv"])
def test_evaluation_through_a_pipeline_is_known_on_every_rank(strategy: str, pool: RankPool) -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    (alone,) = pool.run(evaluated, 1, Case(DEEP["gqa"], "auto", 1))
    for found in pool.run(evaluated, ranks, Case(DEEP["gqa"], strategy, ranks)):
        assert found == pytest.approx(alone, rel=1e-12)


def held(world: World, case: Case) -> tuple[list[str], float]:
    """The names of what a rank holds, and how far the two copies of a tied weight are apart after training."""
    step = step_of(world, case)
    for number in range(3):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    names = [name for name, _ in step.model.named_parameters()]
    apart = 0.0
    if "model.embed_tokens.weight" in names:
        weight = whole(dict(step.model.named_parameters())["model.embed_tokens.weight"].detach())
        apart = float(weight.sum())
    return names, apart


def test_stages_keep_names_and_both_copies_of_a_tied_weight_stay_equal(pool: RankPool) -> None:
    (first, sum_first), (last, sum_last) = pool.run(held, 2, Case(DEEP["tied"], "dp=1 pp=2", 2, micro_steps=4))
    assert "model.layers.0.mlp.up_proj.weight" in first
    assert "model.layers.3.mlp.up_proj.weight" in last
    assert set(first) & set(last) == {"model.embed_tokens.weight"}
    assert sum_first == sum_last
    (both, _), _ = pool.run(held, 2, Case(DEEP["tied"], "dp=1 pp=2 schedule=zbv", 2, micro_steps=4))
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.3.mlp.up_proj.weight"} <= set(both)


def reshaped(world: World, case: Case) -> list[float]:
    """Losses of batches that change their shape from step to step."""
    step = step_of(world, case)
    losses = []
    for number, (samples, tokens) in enumerate([(8, 16), (16, 10), (4, 7), (8, 16)]):
        shaped = Case(case.spec, case.strategy, case.ranks, micro_steps=2, batch=samples, tokens=tokens)
        losses.append(step(number, batch_of(shaped, number, step.data_rank, step.strategy))["loss"])
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_batches_may_change_their_shape_between_steps(schedule: str, pool: RankPool) -> None:
    (alone,) = pool.run(reshaped, 1, Case(DEEP["gqa"], "auto", 1))
    for found in pool.run(reshaped, 2, Case(DEEP["gqa"], f"dp=1 pp=2 schedule={schedule}", 2)):
        assert found == pytest.approx(alone, rel=1e-9)


def expert_metrics(world: World, case: Case) -> dict[str, float]:
    step = step_of(world, case)
    metrics = step(0, batch_of(case, 0, step.data_rank, step.strategy))
    return {name: metrics[name] for name in ("expert_load_max", "dropped")}


def test_load_of_experts_is_that_of_all_stages_on_every_rank(pool: RankPool) -> None:
    experts = DEEP["experts"].experts
    assert experts is not None
    # Only the last of four layers is a mixture, so the first stage has none.
    sparse = experts.model_copy(update={"first_k_dense_replace": 3, "capacity_factor": 1.0})
    spec = DEEP["experts"].model_copy(update={"experts": sparse})
    (alone,) = pool.run(expert_metrics, 1, Case(spec, "auto", 1))
    for found in pool.run(expert_metrics, 4, Case(spec, "dp=2 pp=2", 4)):
        assert found == pytest.approx(alone)


def gradients_of_own_loop(world: World, strategy: str, calls: int, frozen: str | None) -> dict[str, Tensor]:
    """Gradients after some calls without a step in between, of a tied model of which something may be frozen."""
    model = build(DEEP["tied"], seed=1, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    parallel = parallelize(model, strategy)
    tokens = torch.randint(67, (4 * calls, 17), generator=torch.Generator().manual_seed(0))
    for share in tokens.chunk(calls):
        mine = share.chunk(parallel.strategy.dp)[parallel.data_rank].chunk(2)
        batches = [{"tokens_BT": micro[:, :-1]} for micro in mine]
        parallel.forward_backward(
            batches, lambda logits, index, mine=mine: cross_entropy(logits, mine[index][:, 1:]) / 2
        )
    named = {name: parameter.grad for name, parameter in parallel.named_parameters()}
    return {name: whole(gradient).clone() for name, gradient in named.items() if gradient is not None}


@pytest.mark.parametrize("strategy", ["dp=1 pp=2", "dp=2 pp=2 zero=2", "dp=1 pp=2 schedule=zbv"])
@pytest.mark.parametrize(
    ("calls", "frozen"), [(2, None), (1, "model.embed_tokens"), (1, "model.layers.0"), (1, "model.layers")]
)
def test_own_loop_with_several_calls_a_step_and_with_frozen_parts(
    strategy: str, calls: int, frozen: str | None, pool: RankPool
) -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    (alone,) = pool.run(gradients_of_own_loop, 1, "auto", calls, frozen)
    found = {n: g for held in pool.run(gradients_of_own_loop, ranks, strategy, calls, frozen) for n, g in held.items()}
    assert found.keys() == alone.keys()
    for name, gradient in alone.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-12, name


def outputs_of_several(world: World, strategy: str) -> list[float]:
    parallel = parallelize(build(DEEP["tied"], seed=1, dtype=torch.float64).eval(), strategy)
    draw = torch.Generator().manual_seed(0)
    batches = [{"tokens_BT": torch.randint(67, (2, length), generator=draw)} for length in (5, 16, 9, 12)]
    return parallel.forward(batches, lambda logits, _: float(whole(logits).sum()))


@pytest.mark.parametrize("strategy", ["dp=1 pp=2 schedule=interleaved:2", "dp=1 pp=2 schedule=zbv", "dp=1 pp=4"])
def test_several_batches_of_unlike_shapes_go_forward_in_order(strategy: str, pool: RankPool) -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    (alone,) = pool.run(outputs_of_several, 1, "auto")
    (found,) = [result for result in pool.run(outputs_of_several, ranks, strategy) if result]
    assert found == pytest.approx(alone, rel=1e-12)
