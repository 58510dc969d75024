"""What a step holds and what it sends equals the closed forms, byte by byte and collective by collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.estimate.kept import Kept
from meshwright.estimate.state import StateBytes, state_bytes
from meshwright.estimate.traffic import Traffic, Work, step_traffic
from meshwright.estimate.units import Place
from meshwright.parallel.data import fsdp_modules
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep
from meshwright.verify.collectives import RecordCollectives, by_ranks
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

STRATEGIES = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2 wrap=block",
    "dp=2 zero=3",
    "dp=2 zero=3 wrap=block",
    "dp=3 zero=3 wrap=block",
    "dp=4 zero=2 replicate=2",
    "dp=4 zero=1 replicate=2",
    "dp=2 zero=3 replicate=2",
    "dp=2 tp=2 shares=1+3",
    "dp=1 tp=2",
    "dp=1 tp=4 sp=off",
    "dp=2 tp=2",
    "dp=2 zero=1 tp=2",
    "dp=2 zero=3 tp=2 wrap=block",
]
FURTHER = [
    ("tied", "dp=1 pp=2"),
    ("gqa", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("tied", "dp=2 pp=2 zero=2 wrap=block schedule=zbv"),
    ("gqa", "dp=2 pp=2 zero=3 wrap=block"),
    ("gqa", "dp=1 pp=2 tp=2"),
    ("gqa", "dp=2 cp=2 zero=1"),
    ("tied", "dp=2 cp=2 zero=3 wrap=block"),
    ("experts", "dp=4 ep=2"),
    ("experts", "dp=4 ep=2 zero=1"),
    ("experts", "dp=4 ep=2 zero=2 wrap=block"),
    ("experts", "dp=4 ep=2 zero=3 wrap=block"),
    ("experts", "dp=4 replicate=2 ep=2 zero=2 tp=2"),
    ("experts", "dp=2 ep=2 cp=2 pp=2 zero=2"),
]
RECOMPUTING = ["dp=1 tp=2 recompute=full", "dp=1 tp=2 sp=off recompute=full", "dp=2 tp=2 recompute=selective"]


def case_of(shape: str, strategy: str) -> Case:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    # A pipeline needs a layer for each stage.
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": 4}) if "pp=" in strategy else SPECS[shape]
    return Case(spec, strategy, ranks, "float32", micro_steps=2, batch=24)


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterator[Tensor | None]) -> int:
    """The bytes of the storages behind some tensors, each counted once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Peak(TorchDispatchMode):
    """Looks at gathered parameters and at gradients after every operation, and remembers the most."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.parameters = list(step.model.parameters())
        self.groups = [
            group for module in fsdp_modules(step.model) for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        self.is_sharded = step.strategy.zero >= 2 and step.strategy.dp * step.strategy.cp > 1
        self.gathered = self.gradients = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = operation(*inputs, **(options or {}))
        held = [one for group in self.groups for one in group.fsdp_params]
        if self.is_sharded:
            gathered = storage_bytes(part for one in held for part in one.all_gather_outputs)
            self.gathered = max(self.gathered, gathered)
            whole = (one._unsharded_param for one in held if hasattr(one, "_unsharded_param"))
            gradients = storage_bytes(one.grad for one in whole)
            gradients += storage_bytes(one.sharded_param.grad for one in held)
            gradients += storage_bytes(group._partial_reduce_output for group in self.groups)
        else:
            # Where they lie at any time of the step counts: whoever reduces them may keep them there.
            storages = [local(one.grad).untyped_storage() for one in self.parameters if one.grad is not None]
            self.seen |= {storage.data_ptr(): storage.nbytes() for storage in storages}
            gradients = sum(self.seen.values())
        self.gradients = max(self.gradients, gradients)
        return result


NARROW = [
    ("gqa", "dp=2"),
    ("tied", "dp=2 zero=1"),
    ("gqa", "dp=3 zero=3 wrap=block"),
    ("gqa", "dp=2 zero=2 wrap=block"),
    ("gqa", "dp=2 zero=1 tp=2"),
    ("gqa", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("experts", "dp=4 ep=2 zero=3 wrap=block"),
]


def measure_state(world: World, case: Case) -> tuple[StateBytes, StateBytes]:
    """(measured, closed form) of this rank."""
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    with Peak(step) as peak:
        step(2, batch_of(case, 2, step.data_rank, step.strategy))
    optimizer = sum(v.nbytes for state in step.optimizer.state.values() for v in state.values() if v.ndim)
    measured = StateBytes(storage_bytes(iter(step.model.parameters())), peak.gathered, peak.gradients, optimizer)
    assert step.mesh is not None
    place = Place.of(step.strategy, world.rank)
    kept = Kept.of(step.config.precision.stored, step.config.precision.moments)
    return measured, state_bytes(case.spec, step.strategy, place, micro_steps=case.micro_steps, kept=kept)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gqa", "tied", "experts"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_every_rank_equals_the_closed_form(shape: str, strategy: str, pool: RankPool) -> None:
    case = case_of(shape, strategy)
    for measured, expected in pool.run(measure_state, case.ranks, case):
        assert asdict(measured) == asdict(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), FURTHER)
def test_state_under_pipelines_split_sequences_and_dealt_experts(shape: str, strategy: str, pool: RankPool) -> None:
    case = case_of(shape, strategy)
    for measured, expected in pool.run(measure_state, case.ranks, case):
        assert asdict(measured) == asdict(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "moments"), [("float32", "int8"), ("bf16", "float32"), ("bf16", "bf16"), ("bf16", "int8")]
)
@pytest.mark.parametrize(("shape", "strategy"), NARROW)
def test_narrow_state_of_every_rank_equals_the_closed_form(
    shape: str, strategy: str, stored: str, moments: str, pool: RankPool
) -> None:
    settings = {"precision": {"stored": stored, "moments": moments}}
    precision = "bf16" if stored == "bf16" else "float32"
    case = replace(case_of(shape, strategy), precision=precision, settings=settings)
    for measured, expected in pool.run(measure_state, case.ranks, case):
        assert asdict(measured) == asdict(expected)


def measure_traffic(world: World, case: Case) -> tuple[Traffic, Traffic, int, int]:
    """(measured, closed form) of this rank, and (measured, closed form) of how many torch's own counter sees."""
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    batch = batch_of(case, 2, step.data_rank, step.strategy)
    with RecordCollectives() as record:
        step(2, batch)
    # Torch's counter takes one forward pass at a time.
    with CommDebugMode() as counter:
        step(3, {name: value[:1] for name, value in batch.items()})
    assert step.mesh is not None
    own, tp_rank = (
        step.strategy.own_samples(step.data_rank, case.batch // case.micro_steps),
        step.mesh["tp"].get_local_rank(),
    )
    samples = own.stop - own.start
    expected, once = (
        step_traffic(case.spec, step.strategy, Work(micro_steps, samples, case.tokens), tp_rank)
        for micro_steps in (case.micro_steps, 1)
    )
    counts = counter.get_total_counts(), sum(once.counts.values())
    return record.traffic, by_ranks(expected, step.mesh), *counts


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gqa", "few-kv", "gpt", "experts"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *RECOMPUTING])
def test_collectives_of_a_step_equal_the_closed_form(shape: str, strategy: str, pool: RankPool) -> None:
    case = case_of(shape, strategy)
    for measured, expected, counted, expected_count in pool.run(measure_traffic, case.ranks, case):
        assert measured.counts == expected.counts
        assert measured.bytes == expected.bytes
        assert counted == expected_count
