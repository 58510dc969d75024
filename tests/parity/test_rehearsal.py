"""A rehearsed step does what a step of real ranks does: the same collectives and states; its peak is a GPU's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks.gpu_rows import Row, read_rows, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config import RunConfig
from meshwright.estimate.state import state_bytes
from meshwright.estimate.units import Place
from meshwright.parallel.mesh import axes_of
from meshwright.parallel.ring_attention import RING_ATTENTION, ring_forward
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.collectives import collective_of
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from meshwright.verify.rehearsal import Rehearsed, rehearse_step
from tests.parity.test_costs import case_of

CASES = [
    ("gqa", "dp=2"),
    ("gqa", "dp=2 zero=1"),
    ("gqa", "dp=2 zero=3 tp=2 wrap=block"),
    ("gqa", "dp=4 zero=2 replicate=2"),
    ("gqa", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("gqa", "dp=2 cp=2 zero=3"),
    ("experts", "dp=4 ep=2 zero=2 wrap=block"),
    ("experts", "dp=2 ep=2 pp=2 zero=1 recompute=full"),
]
Sums = dict[tuple[str, str], tuple[int, int]]


class Seen(TorchDispatchMode):
    """Calls and bytes of collectives by kind and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        if operation is RING_ATTENTION:
            with self:
                return ring_forward(*inputs)
        result = operation(*inputs, **(options or {}))
        found = collective_of(operation, inputs, result)
        if found is not None:
            self.calls[found.kind, found.ranks] += 1
            self.bytes[found.kind, found.ranks] += found.bytes
        return result


def really(world: World, case: Case) -> Sums:
    """What a rank does in a step, by kind and axis."""
    step = step_of(world, case)
    for number in range(3):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    with Seen() as seen:
        step(3, batch_of(case, 3, step.data_rank, step.strategy))
    names = axes_of(step.mesh)
    return {
        (kind, names.get(ranks, ranks)): (calls, seen.bytes[kind, ranks]) for (kind, ranks), calls in seen.calls.items()
    }


def rehearsed(world: World, case: Case, ranks: list[int]) -> list[Rehearsed]:
    strategy = Strategy.parse(case.strategy, case.ranks)
    config = RunConfig.model_validate({"train": {"precision": case.precision}})
    return [
        rehearse_step(
            case.spec,
            strategy,
            rank,
            config,
            micro_batch=case.batch // case.micro_steps // strategy.dp,
            sequence_length=case.tokens,
            micro_steps=case.micro_steps,
        )
        for rank in ranks
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "text"), CASES)
def test_a_rehearsed_step_has_the_collectives_of_a_real_one(shape: str, text: str, pool: RankPool) -> None:
    case = case_of(shape, text)
    strategy = Strategy.parse(text, case.ranks)
    real = pool.run(really, case.ranks, case)
    ranks = sorted({0, case.ranks - 1})
    (found,) = pool.run(rehearsed, 1, case, ranks)
    for rank, counted in zip(ranks, found, strict=True):
        sums: dict[tuple[str, str], list[float]] = {}
        for (_, kind, axis), (calls, size) in counted.collectives.items():
            both = sums.setdefault((kind, axis), [0, 0])
            both[0], both[1] = both[0] + calls, both[1] + size
        for key, (calls, size) in real[rank].items():
            assert sums.pop(key) == [calls, size if key[0] != "all_to_all" else sums_of(counted, key)], key
        assert not sums
        exact = state_bytes(case.spec, strategy, Place.of(strategy, rank))
        assert (counted.parameters, counted.optimizer) == (exact.parameters, exact.optimizer)


def sums_of(counted: Rehearsed, key: tuple[str, str]) -> float:
    """Bytes as rehearsed: where routers decide how much goes to whom there is nothing to compare with."""
    return sum(size for (_, *kind), (_, size) in counted.collectives.items() if tuple(kind) == key)


# What a compiler decides to keep is not rehearsed.
MEASURED = [row for row in read_rows() if row["compile"] == "off"]


def peak_of(world: World, row: Row) -> int:
    return rehearse_step(
        spec_of(row),
        Strategy.parse(f"dp=1 recompute={row['recompute']}", 1),
        0,
        RunConfig.model_validate({"train": {"precision": row.get("precision") or "bf16"}}),
        micro_batch=int(row["micro_batch"]),
        sequence_length=int(row["sequence_length"]),
        micro_steps=int(row["micro_steps"]),
    ).peak


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(filter(None, row.values())))
def test_the_peak_of_a_rehearsal_is_near_what_an_h200_measured(row: Row, pool: RankPool) -> None:
    (peak,) = pool.run(peak_of, 1, row)
    assert peak / 2**20 == pytest.approx(int(row["peak_allocated_mib"]), rel=0.03)
