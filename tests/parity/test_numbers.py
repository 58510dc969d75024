"""One rank's numerical fault under every kind of split: all ranks skip the step, and nothing has changed; copies that
differ on one rank are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.training_state import state_tensors
from meshwright.faults import parse_faults
from meshwright.models.parts import local_of
from meshwright.parallel.world import World
from meshwright.training.held_state import NonFiniteState, assert_finite
from meshwright.training.injected import flip_bit
from meshwright.training.replicas import Difference, ReplicaCheck
from meshwright.training.step import TrainingStep
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

SHAPES = SPECS | {"four layers": SPECS["gqa"].model_copy(update={"num_hidden_layers": 4})}

STRATEGIES = [
    ("gqa", "dp=2", "float32"),
    ("tied", "dp=2 zero=1", "bf16"),
    ("gqa", "dp=2 zero=2", "float32"),
    ("gpt", "dp=2 zero=3", "bf16"),
    ("few-kv", "dp=4 zero=3 replicate=2", "float32"),
    ("gqa", "dp=1 tp=2", "float32"),
    ("tied", "dp=2 zero=1 tp=2", "bf16"),
    ("tied", "dp=2 pp=2", "float32"),
    ("four layers", "dp=2 pp=2 zero=2 schedule=zbv", "float32"),
    ("gqa", "dp=2 cp=2", "float32"),
    ("experts", "dp=4 zero=2 ep=2", "float32"),
    ("experts", "dp=2 pp=2 ep=2", "float32"),
    ("gqa", "dp=2 offload=optimizer", "float32"),
    ("gqa", "dp=2 zero=3 offload=parameters", "bf16"),
    ("gqa", "dp=2 zero=2", "fp16"),
    ("experts", "dp=2 tp=2", "fp16"),
]


def _case(shape: str, strategy: str, precision: str, **elastic: object) -> Case:
    ranks = 1
    for part in strategy.split():
        key, _, value = part.partition("=")
        ranks *= int(value) if key in ("dp", "tp", "pp", "cp") else 1
    settings = {"elastic": {"nonfinite": "skip", **elastic}, "precision": {"initial_power": 4}}
    return Case(SHAPES[shape], strategy, ranks, precision, settings=settings)


def _feed(step: TrainingStep, case: Case, number: int, fault: str = "") -> dict[str, float]:
    pulse = step.world.pulse
    pulse.step, pulse._faults = number + 1, parse_faults(fault)
    return step(number, batch_of(case, number, step.data_rank, step.strategy))


def _bits(step: TrainingStep) -> dict[str, Tensor]:
    return {name: local_of(value).clone() for name, value in state_tensors(step.model, step.optimizer).items()}


def skip_steps(world: World, case: Case) -> list[tuple[str, float, float, bool, float]]:
    """Two good steps, one with each fault, one more good one; per fault: skipped, counted, unchanged, scale before."""
    step = step_of(world, case)
    for number in range(2):
        assert "nonfinite" not in _feed(step, case, number)
    has_loss = world.gather(torch.tensor([step.parallel.has_loss])).flatten().tolist()
    loser, last = max(rank for rank, has in enumerate(has_loss) if has), world.size - 1
    found = []
    for number, (phase, kind, rank) in enumerate(
        (("forward", "nan", loser), ("forward", "inf", loser), ("reduce", "nan", 0), ("reduce", "inf", last)), 2
    ):
        before, scale = _bits(step), step.loss_scale.value
        metrics = _feed(step, case, number, f"rank={rank},step={number + 1},phase={phase},kind={kind}")
        after = _bits(step)
        same = all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()
        moved = step.loss_scale.value / scale if phase == "forward" else 1.0
        found.append((f"{phase} {kind}", metrics["skipped"], metrics.get("nonfinite", 0), same, moved))
    before = _bits(step)
    metrics = _feed(step, case, 6)
    assert "nonfinite" not in metrics
    changed = any(not torch.equal(value, before[name]) for name, value in _bits(step).items())
    found.append(("good", 0.0, metrics.get("loss", float("nan")), changed, 1.0))
    return found


@pytest.mark.parametrize(("shape", "strategy", "precision"), STRATEGIES)
def test_a_fault_on_one_rank_skips_the_step_on_all_and_changes_nothing(
    pool: RankPool, shape: str, strategy: str, precision: str
) -> None:
    case = _case(shape, strategy, precision)
    ranks = pool.run(skip_steps, case.ranks, case)
    for rank, found in enumerate(ranks):
        *faults, good = found
        for fault, skipped, counted, same, moved in faults:
            assert skipped == 1, f"rank {rank} learned from {fault}"
            # With fp16, gradients that overflow are answered with a smaller scale and are no fault.
            assert counted == (0 if precision == "fp16" and fault.startswith("reduce") else 1), f"rank {rank}: {fault}"
            assert same, f"rank {rank}: weights, moments or buffers changed with {fault}"
            assert moved == 1, f"rank {rank}: the loss scale moved with {fault}"
        assert good[3], "the next step was not learned from"
        assert good == ranks[0][-1]


def counts_of_steps(world: World, case: Case, fault: str) -> set[float]:
    step = step_of(world, case)
    for number in range(4):
        _feed(step, case, number, fault)
    return {float(value) for name, value in state_tensors(step.model, step.optimizer).items() if ".step." in name}


def test_a_skipped_step_does_not_count_in_the_bias_correction_of_the_moments(pool: RankPool) -> None:
    case = _case("gqa", "dp=2 zero=1", "float32")
    assert pool.run(counts_of_steps, 2, case, "") == [{4.0}, {4.0}]
    assert pool.run(counts_of_steps, 2, case, "rank=1,step=3,phase=forward,kind=nan") == [{3.0}, {3.0}]


COPIES: dict[str, tuple[str, str, int, str, set[int]]] = {
    # shape, strategy, the rank and the parameter with the flipped bit, who is named
    "dp": ("gqa", "dp=4", 2, "norm", {2}),
    "dp of two": ("gqa", "dp=2", 1, "norm", {0, 1}),
    "zero=1": ("gqa", "dp=3 zero=1", 1, "q_proj", {1}),
    "hsdp": ("gqa", "dp=4 zero=3 replicate=2", 3, "down_proj", {1, 3}),
    "three replicas of shards": ("gqa", "dp=6 zero=3 replicate=3", 3, "down_proj", {3}),
    "norm beside split matrices": ("gqa", "dp=1 tp=4", 1, "input_layernorm", {1}),
    "split matrix": ("gqa", "dp=3 tp=2", 4, "q_proj", {4}),
    "tied embeddings on two stages": ("tied", "dp=2 pp=2", 3, "embed_tokens", {3}),
    "layer of a stage": ("gqa", "dp=3 pp=2", 4, "down_proj", {4}),
    "cp": ("gqa", "dp=1 cp=4", 3, "k_proj", {3}),
    "experts": ("experts", "dp=4 ep=2", 1, "experts", {1, 3}),
    "beside experts": ("experts", "dp=4 ep=2", 1, "q_proj", {1}),
}


def flip_and_compare(world: World, case: Case, guilty: int, name: str) -> tuple[list[Difference], ...]:
    step = step_of(world, case)
    check = ReplicaCheck(world, step.mesh)
    untrained = check(step.model, step.optimizer)
    for number in range(3):
        _feed(step, case, number)
    trained = check(step.model, step.optimizer)
    if world.rank == guilty:
        flip_bit(step.parallel.named_parameters(), f"bitflip:{name}")
    found = check(step.model, step.optimizer)
    if name == "norm":
        _feed(step, case, 3)
        assert [one.odd for one in check(step.model, step.optimizer)] == [one.odd for one in found]
    return untrained, trained, found


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_that_differs_by_one_bit_is_named(pool: RankPool, kind: str) -> None:
    shape, strategy, guilty, name, odd = COPIES[kind]
    case = _case(shape, strategy, "float32")
    if case.ranks % 3 == 0:
        case = Case(**{**case.__dict__, "batch": 24})
    results = pool.run(flip_and_compare, case.ranks, case, guilty, name)
    for untrained, trained, found in results:
        assert untrained == trained == [], "copies that are the same"
        assert found == results[0][2], "all ranks say the same"
        (one,) = found
        assert set(one.odd) == odd
        assert guilty in one.ranks
        assert name in one.name
        assert len(one.hosts) == len(one.odd)
        assert one.over_tp == (kind == "norm beside split matrices"), "copies that no sum over ranks keeps the same"


def moments_too(world: World, case: Case) -> list[Difference]:
    step = step_of(world, case)
    _feed(step, case, 0)
    if world.rank == 1:
        local = next(
            local_of(value) for name, value in state_tensors(step.model, step.optimizer).items() if "exp_avg_sq" in name
        )
        local.view(-1)[5] += 1e-3
    return ReplicaCheck(world)(step.model, step.optimizer)


def test_moments_that_differ_are_found(pool: RankPool) -> None:
    (found, *_) = pool.run(moments_too, 3, Case(**{**_case("gqa", "dp=3", "float32").__dict__, "batch": 24}))
    (one,) = found
    assert one.name.startswith("optimizer.exp_avg_sq.")
    assert one.odd == (1,)
    assert "differs from that of 2 other ranks" in str(one)


def spoil_one(world: World, case: Case, guilty: int, kind: str) -> str:
    step = step_of(world, case)
    _feed(step, case, 0)
    assert_finite(step.model, step.optimizer, world, 1)
    if world.rank == guilty:
        held = [
            local_of(value)
            for name, value in state_tensors(step.model, step.optimizer).items()
            if name.startswith(kind)
        ]
        next(value for value in held if value.numel() and value.ndim).view(-1)[0] = float("nan")
    try:
        assert_finite(step.model, step.optimizer, world, 7)
    except NonFiniteState as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "kind"), [("dp=2 zero=3", "model."), ("dp=2 zero=1", "optimizer."), ("dp=1 pp=2", "model.")]
)
def test_a_state_with_nan_on_one_rank_is_refused_by_all_by_name(pool: RankPool, strategy: str, kind: str) -> None:
    messages = pool.run(spoil_one, 2, _case("gqa", strategy, "float32"), 1, kind)
    assert messages[0] == messages[1]
    assert f"step 7: the state is not saved, since it holds values that are no numbers: {kind}" in messages[0]
    assert "on rank 1 of 2" in messages[0]
