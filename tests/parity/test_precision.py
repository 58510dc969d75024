"""Loss scaling agrees on all ranks, dtypes are used where they are set, and deterministic runs repeat bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.world import World
from meshwright.verify.parity import Case, batch_of, run_case, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

OVERFLOWS = {1, 2, 3, 7}
# Hysteresis 2: the first overflow is forgiven, the second and third halve; three good steps double and forgive anew.
SCALES = [16.0, 16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
SKIPPED = [0, 1, 1, 1, 0, 0, 0, 1, 0]


def with_overflows_on_last_rank(world: World, case: Case) -> tuple[list[float], list[float], list[bool]]:
    """Scales, skips, and whether weights moved, of a run in which one rank's gradients overflow in some steps."""
    step = step_of(world, case)
    number = 0

    def overflow(module: nn.Module, inputs: object, output: Tensor) -> None:
        if number in OVERFLOWS and world.rank == world.size - 1:
            output.register_hook(lambda gradient: gradient * float("inf"))

    step.model.model.norm.register_forward_hook(overflow)
    scales, skipped, moved = [], [], []
    for number in range(len(SCALES)):
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        metrics = step(number, batch_of(case, number, step.data_rank, step.strategy))
        scales.append(metrics["loss_scale"])
        skipped.append(metrics["skipped"])
        pairs = zip(before, step.model.parameters(), strict=True)
        moved.append(any(not torch.equal(local(old), local(new)) for old, new in pairs))
    return scales, skipped, moved


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("auto", 1), ("dp=2", 2), ("dp=2 zero=1", 2), ("dp=4 zero=3", 4), ("dp=1 tp=2", 2), ("dp=2 zero=3 tp=2", 4)],
)
def test_overflow_on_one_rank_moves_the_scale_of_all_as_computed_by_hand(
    strategy: str, ranks: int, pool: RankPool
) -> None:
    settings = {"precision": {"initial_power": 4, "window": 3, "hysteresis": 2, "minimum": 1.0}}
    case = Case(SPECS["gqa"], strategy, ranks, "fp16", settings=settings)
    for scales, skipped, moved in pool.run(with_overflows_on_last_rank, ranks, case):
        assert scales == SCALES
        assert skipped == SKIPPED
        assert moved == [not skip for skip in SKIPPED]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=2", "dp=2 tp=2"])
def test_gradients_travel_in_the_dtype_that_is_set(strategy: str, pool: RankPool) -> None:
    ranks = 4 if "tp" in strategy else 2
    exact = Case(SPECS["gqa"], strategy, ranks, "float32", micro_steps=1)
    rounded = Case(SPECS["gqa"], strategy, ranks, "float32", micro_steps=1, settings={"precision": {"reduce": "bf16"}})
    one, other = (pool.run(run_case, ranks, case)[0] for case in (exact, rounded))
    assert one.losses[0] == other.losses[0]
    # bfloat16 has 8 bits: a norm made of rounded gradients is off by that much and not by more.
    assert 0 < abs(one.norms[0] / other.norms[0] - 1) < 2**-7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp=4", "dp=4 zero=3", "dp=2 zero=1 tp=2"])
def test_two_runs_give_the_same_bits(strategy: str, pool: RankPool) -> None:
    case = Case(SPECS["gqa"], strategy, 4, "float32", settings={"train": {"deterministic": True}})
    one, other = (pool.run(run_case, 4, case)[0] for _ in range(2))
    assert one.losses == other.losses
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
