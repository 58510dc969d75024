"""Updates that a device decides on: they are those that the host would decide on, or none at all."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import ElasticSection
from meshwright.models.mixture import mixtures
from meshwright.models.spec import Experts
from meshwright.optim.adamw import FusedAdamW
from meshwright.parallel.norm import clip_grad_norm_, grad_norm
from meshwright.parallel.world import World
from meshwright.training import step as step_file
from meshwright.training.guard import FEWEST, Guard
from meshwright.training.update import OnItsWay, unfit, update, update_if_fit, updates_on_device
from meshwright.verify.parity import Case, batch_of, step_of
from tests.unit.specs import SPECS, small

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "own adamw": lambda params: FusedAdamW(params, lr=1e-2),
    "own adamw, 8 bits": lambda params: FusedAdamW(params, lr=1e-2, moments="int8"),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "sgd without momentum": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (4,))]


def give_gradients(params: list[nn.Parameter], seed: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor
    return grad_norm(params, scale=factor)


def held(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Weights and everything that the optimizer remembers of them, zeros where it remembers nothing yet."""
    kept = [value for parameter in params for value in optimizer.state.get(parameter, {}).values()]
    return [value.detach().clone() for value in (*params, *kept) if isinstance(value, Tensor)]


ONE, ZERO = torch.ones(()), torch.zeros(())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_left_out_changes_nothing(name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    for seed in range(2):
        update_if_fit(optimizer, ZERO, give_gradients(params, seed), 0.5, 1.0)
    before = held(optimizer, params)
    for spoiled in (math.nan, math.inf, 1.0):
        norm = give_gradients(params, 7) * spoiled
        for parameter in params:
            parameter.grad *= spoiled
        update_if_fit(optimizer, ONE, norm, 0.5, 8.0)
    after = held(optimizer, params)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert optimizer.grad_scale is None
    assert optimizer.found_inf is None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("clip", "scale"), [(0.5, 1.0), (0.0, 1.0), (0.5, 1024.0), (0.0, 1024.0)])
@pytest.mark.parametrize("skipped", [(), (0,), (0, 2)])
def test_the_steps_that_are_taken_are_those_of_clipping_and_an_ordinary_update(
    name: str, clip: float, scale: float, skipped: tuple[int, ...]
) -> None:
    ours, theirs = parameters(), parameters()
    one, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    # What is not written must not be read: memory that a device gives is full of others' numbers.
    with filled_memory():
        for number in range(4):
            skip = number in skipped
            factor = math.inf if skip else scale
            update_if_fit(one, ONE if skip else ZERO, give_gradients(ours, number, factor), clip, scale)
            norm = give_gradients(theirs, number, scale)
            if not skip:
                update([other], theirs, norm, clip, scale)
    for found, expected in zip(held(one, ours), held(other, theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class filled_memory:
    """Fresh memory is full of NaN while it lasts."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)
        self.before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self.before
        torch.use_deterministic_algorithms(False)


def test_an_ordinary_update_is_clipping_and_a_step() -> None:
    ours, theirs = parameters(), parameters()
    one, other = (torch.optim.SGD(params, lr=1e-2) for params in (ours, theirs))
    update([one], ours, give_gradients(ours, 1, 4.0), 0.5, 4.0)
    give_gradients(theirs, 1, 4.0)
    clip_grad_norm_(theirs, 0.5, scale=4.0)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


VALUES = [0.0, 0.5, 2.0, 2.0001, 1e3, 1e300, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
@pytest.mark.parametrize(("spike", "spike_norm"), [(0.0, 0.0), (6.0, 0.0), (0.0, 6.0), (6.0, 6.0)])
@pytest.mark.parametrize("steps", [0, FEWEST - 1, FEWEST, 40])
def test_the_device_and_the_host_never_disagree(policy: Any, spike: float, spike_norm: float, steps: int) -> None:
    guard = Guard(ElasticSection(spike=spike, spike_norm=spike_norm, spike_policy=policy))
    for number in range(steps):
        guard.judge(2.0 + 0.01 * math.sin(number), 1.0 + 0.1 * math.cos(number))
    if steps < FEWEST or policy != "skip" or not (spike or spike_norm):
        assert guard.limits() == (math.inf, math.inf)
    highest = [limit for limit in guard.limits() if math.isfinite(limit)]
    # On the border itself, and one number above it.
    borders = [value for limit in highest for value in (limit, math.nextafter(limit, math.inf))]
    for loss in (*VALUES, *borders):
        for norm in (*VALUES, *borders):
            told = unfit(*torch.tensor([loss, norm], dtype=torch.float64), guard.limits())
            assert bool(told) != deepcopy(guard).judge(loss, norm).learn, (loss, norm)


def test_numbers_on_their_way_arrive_as_they_were() -> None:
    assert OnItsWay(torch.tensor([1.5, math.inf], dtype=torch.float64)).read() == [1.5, math.inf]


def test_only_a_gpu_that_can_decides_for_itself() -> None:
    (weight, *_) = parameters()
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert not updates_on_device(torch.optim.AdamW([weight], fused=True), cpu)
    assert not updates_on_device(torch.optim.Adafactor([weight]), cuda)
    assert not updates_on_device(torch.optim.AdamW([weight], foreach=True), cuda)
    assert updates_on_device(torch.optim.AdamW([weight], fused=True), cuda)
    assert updates_on_device(FusedAdamW([weight]), cuda)


def trained(case: Case, on_device: bool, monkeypatch: pytest.MonkeyPatch, spoil: dict[int, float]) -> Any:
    """Metrics of all steps, final weights and states; losses of some steps are multiplied."""
    monkeypatch.setattr(step_file, "updates_on_device", lambda *_: on_device)
    now = 0
    monkeypatch.setattr(step_file, "factor_of_loss", lambda _: spoil.get(now))
    step = step_of(World(device=torch.device("cpu")), case)
    said = []
    while now < case.steps:
        said.append(step(now, batch_of(case, now, 0, step.strategy)))
        now += 1
    return said, held(step.optimizer, list(step.model.parameters())), step.loss_scale.state(), step.guard.state()


def agree(case: Case, monkeypatch: pytest.MonkeyPatch, spoil: dict[int, float]) -> list[dict[str, float]]:
    """Raise unless host and device decide alike; gives what the steps told."""
    ours, theirs = (trained(case, on_device, monkeypatch, spoil) for on_device in (True, False))
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert ours[2] == theirs[2]
    found: list[dict[str, float]] = ours[0]
    return found


@pytest.mark.parametrize("name", ["plain", "experts"])
def test_once_the_update_is_launched_the_host_reads_nothing_but_the_numbers_on_their_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else it reads would make it wait for the update; here how many targets count is not known before."""
    launched, readers = False, []

    def launch(*how: Any) -> None:
        nonlocal launched
        update_if_fit(*how)
        launched = True

    def watch(method: str) -> None:
        plain = getattr(Tensor, method)

        def read(tensor: Tensor) -> Any:
            if launched:
                readers.append(sys._getframe(1).f_code)
            return plain(tensor)

        monkeypatch.setattr(Tensor, method, read)

    case = Case(SPECS[name], "auto", 1, "float32", steps=2, batch=4)
    step = step_of(World(device=torch.device("cpu")), case)
    batches = [batch_of(case, number, 0, step.strategy) for number in range(2)]
    counts = [int((batch["tokens"][..., 1:] >= 0).sum()) for batch in batches]
    monkeypatch.setattr(step_file, "updates_on_device", lambda *_: True)
    monkeypatch.setattr(step_file, "update_if_fit", launch)
    for method in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__"):
        watch(method)
    for number, batch in enumerate(batches):
        assert "valid" not in batch
        launched = False
        told = step(number, batch)
        assert told["tokens"] == counts[number]
        assert ("expert_load_max" in told) == (name == "experts")
    assert readers == [OnItsWay.read.__code__] * 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_training_that_a_device_decides_on_is_that_of_the_host(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train": {"optimizer": optimizer}, "elastic": {"nonfinite": "skip"}}
    case = Case(small(), "auto", 1, "float32", steps=6, batch=4, settings=settings)
    told = agree(case, monkeypatch, {0: math.nan, 3: math.inf})
    assert [metrics.get("nonfinite", 0) for metrics in told] == [1, 0, 0, 1, 0, 0]
    assert [metrics.get("skipped", 0) for metrics in told] == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("on_device", [True, False])
def test_balancing_biases_stay_after_a_step_that_is_left_out(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, router_bias_update_rate=0.01)
    settings = {"elastic": {"nonfinite": "skip"}}
    case = Case(small(experts=experts), "auto", 1, "float32", steps=4, batch=4, settings=settings)
    now = 0
    monkeypatch.setattr(step_file, "updates_on_device", lambda *_: on_device)
    monkeypatch.setattr(step_file, "factor_of_loss", lambda _: math.nan if now in (0, 2) else None)
    step = step_of(World(device=torch.device("cpu")), case)
    biases = [torch.cat([layer.expert_bias for layer in mixtures(step.model)])]
    for now in range(case.steps):
        step(now, batch_of(case, now, 0, step.strategy))
        biases.append(torch.cat([layer.expert_bias for layer in mixtures(step.model)]))
        # What a step that is left out has counted is none of the next one's.
        assert not any(layer.expert_load.any() for layer in mixtures(step.model))
    moved = [not torch.equal(before, after) for before, after in pairwise(biases)]
    assert moved == [False, True, False, True]


def test_spikes_are_left_out_on_a_device_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = {"spike": 6.0, "spike_policy": "skip", "spike_window": 16}
    case = Case(small(), "auto", 1, "float32", steps=20, batch=4, settings={"elastic": elastic})
    told = agree(case, monkeypatch, {5: 30.0, 17: 30.0})
    # The first one comes before there is enough to compare with.
    assert [metrics["step"] for metrics in told if metrics.get("spike")] == [18]
    assert [metrics["step"] for metrics in told if metrics.get("skipped")] == [18]


def test_overflows_in_fp16_move_the_scale_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = {"initial_power": 40, "window": 3, "hysteresis": 1}
    case = Case(SPECS["tied"], "auto", 1, "fp16", steps=24, batch=4, micro_steps=1, settings={"precision": precision})
    said = agree(case, monkeypatch, {})
    assert said[0]["skipped"] == 1, "a scale of two to the 40th overflows"
    assert any(not metrics["skipped"] for metrics in said)
    assert said[-1]["loss_scale"] < said[0]["loss_scale"]
