"""Weights in bfloat16 and narrow moments: rounded the same under every strategy, and the same after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.format import Manifest, read_manifest
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.training_state import parts_of, restore
from meshwright.models.counter_random import key_of, normal
from meshwright.models.parts import part_like, whole
from meshwright.optim.adamw import FusedAdamW
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.world import World
from meshwright.training.held_state import nonfinite_tensors
from meshwright.training.replicas import ReplicaCheck
from meshwright.training.step import TrainingStep
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

STRATEGIES = [
    ("gqa", "dp=2", 2),
    ("gqa", "dp=2 zero=1", 2),
    ("gqa", "dp=3 zero=2", 3),
    ("gqa", "dp=2 zero=3", 2),
    ("tied", "dp=4 zero=3 replicate=2", 4),
    ("gqa", "dp=1 tp=2", 2),
    ("gqa", "dp=2 zero=1 tp=2", 4),
    ("few-kv", "dp=2 zero=3 tp=2", 4),
    ("tied", "dp=2 pp=2 zero=1", 4),
    ("experts", "dp=4 ep=2 zero=1", 4),
    ("experts", "dp=4 ep=2 zero=3", 4),
    ("experts", "dp=2 ep=2 tp=2", 4),
    ("gqa", "dp=1 offload=optimizer", 1),
    ("gqa", "dp=2 zero=3 offload=parameters", 2),
]


def case_of(shape: str, strategy: str, ranks: int, moments: str) -> Case:
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": 4}) if "pp=" in strategy else SPECS[shape]
    settings = {"precision": {"stored": "bf16", "moments": moments}}
    return Case(spec, strategy, ranks, "bf16", batch=24, settings=settings)


def gradient_of(name: str, shape: torch.Size, number: int) -> Tensor:
    """The same on every rank, however the parameter is split."""
    index = torch.arange(shape.numel())
    return normal(key_of(name, number), index).view(shape).to(torch.bfloat16)


def after_given_gradients(world: World, case: Case) -> dict[str, Tensor]:
    """The weights after some updates by gradients that do not depend on the strategy; whole, by name."""
    step = step_of(world, case)
    for number in range(4):
        for name, parameter in step.parallel.named_parameters():
            parameter.grad = part_like(gradient_of(name, parameter.shape, number), parameter)
        step.optimizer.step()
        step.optimizer.zero_grad()
    return {name: whole(parameter.detach()).cpu() for name, parameter in step.parallel.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "bf16"])
@pytest.mark.parametrize(("shape", "strategy", "ranks"), STRATEGIES)
def test_equal_gradients_give_equal_weights_bit_for_bit(
    shape: str, strategy: str, ranks: int, moments: str, pool: RankPool
) -> None:
    case = case_of(shape, strategy, ranks, moments)
    alone = replace(case, strategy="auto", ranks=1)
    (expected,) = pool.run(after_given_gradients, 1, alone)
    seen = set()
    for found in pool.run(after_given_gradients, ranks, case):
        for name, weight in found.items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, expected[name]), name
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp=2 zero=1", "dp=2 zero=3", "dp=1 tp=2"])
def test_eight_bits_differ_a_little_where_blocks_are_cut_elsewhere(strategy: str, pool: RankPool) -> None:
    case = case_of("gqa", strategy, 2, "int8")
    alone = replace(case, strategy="auto", ranks=1)
    (expected,) = pool.run(after_given_gradients, 1, alone)
    for found in pool.run(after_given_gradients, 2, case):
        for name, weight in found.items():
            # Four updates of 1e-2 each, the parts of which that depend on scales are off by a sixteenth at most.
            torch.testing.assert_close(weight.float(), expected[name].float(), rtol=2**-7, atol=8e-3)


def values_of(step: TrainingStep) -> dict[str, Tensor]:
    """All that a checkpoint would hold of this rank."""
    return {name: held.values().detach().cpu().clone() for name, held in parts_of(step.model, step.optimizer).items()}


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def interrupted(world: World, case: Case, folder: Path) -> tuple[list[str], list[str], set[str]]:
    """What differs between a run and one that was saved and loaded in between: at once, and two steps later."""
    step, again = step_of(world, case), step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    facts = Manifest(step=2, position=0, strategy=case.strategy, model=case.spec, tensors={})
    saver = Saver(LocalPlace(folder), world.side_channel(), Retention())
    saver.save(facts, parts_of(step.model, step.optimizer), background=True)
    saver.wait()
    (outcome,) = saver.outcomes()
    assert outcome.error is None, outcome.error
    assert not ReplicaCheck(world, step.mesh)(step.model, step.optimizer)
    assert not nonfinite_tensors(step.model, step.optimizer)
    restore(CheckpointReader(folder / "step-000002"), again.model, again.optimizer)
    at_once = unlike(values_of(step), values_of(again))
    for number in range(2, 4):
        for one in (step, again):
            one(number, batch_of(case, number, step.data_rank, step.strategy))
    manifest = read_manifest(folder / "step-000002")
    dtypes = {entry.dtype for name, entry in manifest.tensors.items() if "exp_avg" in name}
    return at_once, unlike(values_of(step), values_of(again)), dtypes


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "saved"), [("float32", "float32"), ("bf16", "bfloat16"), ("int8", "float32")])
@pytest.mark.parametrize(
    ("shape", "strategy", "ranks"),
    [("gqa", "auto", 1), ("tied", "dp=2 zero=1", 2), ("experts", "dp=4 ep=2 zero=3", 4), ("gqa", "dp=1 tp=2", 2)],
)
def test_a_run_that_was_interrupted_is_the_same_run_bit_for_bit(
    shape: str, strategy: str, ranks: int, moments: str, saved: str, pool: RankPool, tmp_path: Path
) -> None:
    case = case_of(shape, strategy, ranks, moments)
    for at_once, later, dtypes in pool.run(interrupted, ranks, case, tmp_path):
        assert at_once == later == []
        assert dtypes == {saved}


def trained(world: World, case: Case, folder: Path) -> list[float]:
    """The losses of eight steps; the state after the first four is saved."""
    step = step_of(world, case)
    losses = []
    for number in range(8):
        losses.append(step(number, batch_of(case, number, step.data_rank, step.strategy))["loss"])
        if number == 3:
            facts = Manifest(step=4, position=0, strategy=case.strategy, model=case.spec, tensors={})
            saver = Saver(LocalPlace(folder), world.side_channel(), Retention())
            saver.save(facts, parts_of(step.model, step.optimizer), background=False)
    return losses


def gone_on(world: World, case: Case, folder: Path) -> tuple[list[float], set[str]]:
    """The losses of the last four steps with other moments or another strategy, and how moments are kept."""
    step = step_of(world, case)
    restore(CheckpointReader(folder / "step-000004"), step.model, step.optimizer)
    losses = [step(number, batch_of(case, number, step.data_rank, step.strategy))["loss"] for number in range(4, 8)]
    inner = step.optimizer.inner if isinstance(step.optimizer, LocalOptimizer) else step.optimizer
    assert isinstance(inner, FusedAdamW)
    return losses, {str(state["exp_avg"].dtype) for state in inner.state.values()}


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("other", ["float32", "bf16", "int8"])
def test_other_moments_under_another_strategy_go_on_from_a_checkpoint(
    moments: str, other: str, pool: RankPool, tmp_path: Path
) -> None:
    before, after = case_of("gqa", "dp=2 zero=1", 2, moments), case_of("gqa", "dp=2 zero=3", 2, other)
    losses = pool.run(trained, 2, before, tmp_path)[0]
    kept = {"float32": "torch.float32", "bf16": "torch.bfloat16", "int8": "torch.uint8"}[other]
    for found, dtypes in pool.run(gone_on, 2, after, tmp_path):
        assert found == pytest.approx(losses[4:], rel=2e-2)
        assert dtypes == {kept}
