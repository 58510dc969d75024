"""A step makes the host wait for the GPU once, at its end, for its numbers: everything else is launched ahead of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.training.step import TrainingStep
from meshwright.verify.parity import Case, batch_of, step_of
from tests.parity.conftest import SPECS

DEVICE = torch.device("cuda", 0)
WARM = 2
"""Steps that may wait: kernels are compiled, the optimizer makes its state."""


def prepared(name: str, precision: str, settings: dict[str, dict[str, object]]) -> Callable[[int], object]:
    """A step with everything on its way that a training has: pinned batches, and a known count of targets."""
    case = Case(SPECS[name], "auto", 1, precision, settings=settings, steps=WARM + 2)
    torch.cuda.set_device(DEVICE)
    step: TrainingStep = step_of(World(device=DEVICE), case)

    def run(number: int) -> object:
        batch = batch_of(case, number, 0, step.strategy)
        batch["valid"] = (batch["tokens"][..., 1:] >= 0).sum()
        return step(number, {key: value if key == "valid" else value.pin_memory() for key, value in batch.items()})

    return run


def waits(run: Callable[[int], object], number: int) -> list[str]:
    """Where torch says that the host waited; the one event that a step waits for is none of them."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in told if "synchroniz" in str(one.message)]


def test_a_wait_is_seen() -> None:
    value = torch.ones((), device=DEVICE)
    assert len(waits(lambda _: value.item(), 0)) == 1


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize(
    ("name", "precision"), [("gqa", "float32"), ("gqa", "bf16"), ("tied", "bf16"), ("gpt", "bf16")]
)
def test_a_step_waits_for_nothing_but_its_numbers(name: str, precision: str, compiled: str) -> None:
    run = prepared(name, precision, {"train": {"compile": compiled}})
    for number in range(WARM):
        run(number)
    assert waits(run, WARM) == []


def test_a_step_that_scales_its_loss_or_looks_for_spikes_waits_for_nothing_else() -> None:
    settings = {
        "train": {"compile": "off"},
        "elastic": {"spike": 6.0, "spike_policy": "skip"},
        "precision": {"initial_power": 8},
    }
    run = prepared("gqa", "fp16", settings)
    for number in range(WARM):
        run(number)
    assert waits(run, WARM) == []
