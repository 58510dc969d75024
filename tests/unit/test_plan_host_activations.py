"""Plans with activations in host memory: what falls on the chip, what rises in the host, and what it takes."""

from __future__ import annotations

import time

import pytest

from meshwright.planning.answer import plan
from meshwright.planning.host_activations import Layers, moved
from meshwright.planning.layer_memory import LayerKept
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB


def planned(strategy: str, *, length: int = 8192, micro_batch: int = 1, cluster: str = "8xh100") -> Candidate:
    return plan(
        "llama3.1-8b", cluster, strategy=strategy, sequence_length=length, global_batch=64, micro_batch=micro_batch
    ).shown


def test_the_chip_holds_two_layers_and_the_host_all_but_the_last() -> None:
    kept, again = LayerKept(6.0, 3.0, 0.0, 1.0), LayerKept(0.0, 0.0, 2.0)
    found = moved([Layers(again, 20.0, 3, 4), Layers(kept, 5.0, 2, 4)], has_last=True)
    assert found.working == (12.0, 6.0, 0.0, 2.0)
    assert found.beside == 5.0
    assert found.at_loss == kept
    assert found.host == (4 * (3 * 2.0 + 2 * 10.0) - 10.0) * 1.125
    alone = moved([Layers(kept, 5.0, 1, 1)], has_last=False)
    assert alone.working == kept


@pytest.mark.parametrize("rest", ["dp=8 zero=3", "dp=8 zero=3 recompute=full", "dp=4 pp=2 zero=1", "dp=2 tp=4"])
def test_memory_moves_from_the_chip_to_the_host(rest: str) -> None:
    plain, offloaded = planned(rest), planned(f"{rest} offload=activations")
    for before, after in zip(plain.memory.stages, offloaded.memory.stages, strict=True):
        assert after.activations < before.activations
        assert after.parameters == before.parameters
    saved = max(one.activations for one in plain.memory.stages) - max(
        one.activations for one in offloaded.memory.stages
    )
    assert offloaded.memory.host - plain.memory.host >= saved


def test_what_the_host_has_no_room_for_does_not_fit() -> None:
    found = planned("dp=1 offload=activations", length=131072, micro_batch=8, cluster="1xh200")
    assert found.memory.host > 256 * GIB
    assert found.memory.verdict == "does not fit"


def test_a_pass_takes_as_long_as_the_slower_of_computing_and_moving() -> None:
    # A layer's input takes less time on its way than the layer to compute; all that it keeps takes much longer.
    light, heavy = planned("dp=8 zero=3 recompute=full"), planned("dp=8 zero=3")
    hidden, seen = (planned(f"dp=8 zero=3 recompute={one} offload=activations") for one in ("full", "none"))
    assert hidden.step_s < 1.02 * light.step_s
    assert 0 < hidden.parts.offload < 0.02 * hidden.step_s
    assert seen.step_s > 1.5 * heavy.step_s
    assert seen.parts.compute == pytest.approx(heavy.parts.compute, rel=1e-6)
    assert seen.parts.total == pytest.approx(seen.step_s)


def test_long_sequences_on_one_chip_are_planned_with_it_in_seconds() -> None:
    words = {"sequence_length": 65536, "global_batch": 4, "stored": "bf16", "moments": "int8"}
    start = time.perf_counter()
    without = plan("llama3.1-8b", "1xh100", constraints="offload!=activations offload!=optimizer+activations", **words)  # type: ignore[arg-type]
    found = plan("llama3.1-8b", "1xh100", **words)  # type: ignore[arg-type]
    assert found.best is not None
    assert found.best.strategy.host_activations
    assert without.best is None or without.best.step_s > found.best.step_s
    assert time.perf_counter() - start < 20
