"""The optimizer of a rank's own parts, on one process: the plain one to the last bit, with its state in host memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.parallel.local_optimizer import BY_ELEMENT, LocalOptimizer
from meshwright.parallel.parallelize import parallelize
from tests.unit.specs import small

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
EXTRA = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.RMSprop: {"momentum": 0.5}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, the others without."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def local(model: nn.Module, kind: Any = torch.optim.AdamW, on_host: bool = True, **options: Any) -> LocalOptimizer:
    return LocalOptimizer(groups_of(model), lambda groups: kind(groups, **(options or ADAMW)), on_host=on_host)


def train_step(model: Decoder, optimizer: Any, step: int, rate: float | None = None) -> None:
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(step))
    model(tokens).square().mean().backward()
    if step % 3 == 2:
        # A parameter without a gradient is left alone, and its moments too.
        model.lm_head.weight.grad = model.model.norm.weight.grad = None
    for group in optimizer.param_groups:
        group["lr"] = rate or group["lr"]
    optimizer.step()
    optimizer.zero_grad()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs[1]), name


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_are_those_of_adamw_to_the_last_bit(on_host: bool, fused: bool) -> None:
    ours, plain = build(small()), build(small())
    optimizer = local(ours, on_host=on_host, **ADAMW, fused=fused)
    expected = torch.optim.AdamW(groups_of(plain), **ADAMW, fused=fused)
    for step in range(7):
        train_step(ours, optimizer, step, rate=1e-2 / (1 + step))
        train_step(plain, expected, step, rate=1e-2 / (1 + step))
        assert_same_weights(ours, plain)
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        held, state = optimizer.state_of(mine), expected.state[other]
        assert held.keys() == state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(held[kind], state[kind]) for kind in state)
    # Whoever asks the optimizer itself, as tools for memory and logging do, finds the state too.
    assert len(optimizer.state) == len(expected.state)
    assert optimizer.state_dict()["state"].keys() == expected.state_dict()["state"].keys()


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_steps_are_those_of_every_optimizer_that_is_let_in(kind: type[torch.optim.Optimizer]) -> None:
    ours, plain, options = build(small()), build(small()), {"lr": 1e-2, **EXTRA.get(kind, {})}
    optimizer, expected = local(ours, kind, **options), kind(groups_of(plain), **options)
    for step in range(4):
        train_step(ours, optimizer, step)
        train_step(plain, expected, step)
    assert_same_weights(ours, plain)


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_that_others_change_between_steps_are_taken_up(on_host: bool) -> None:
    ours, plain = build(small()), build(small())
    optimizer, expected = local(ours, on_host=on_host), torch.optim.AdamW(groups_of(plain), **ADAMW)
    for step in range(4):
        train_step(ours, optimizer, step)
        train_step(plain, expected, step)
        for parameter in (*ours.parameters(), *plain.parameters()):
            # In place, and in new memory.
            parameter.data.mul_(0.5)
            parameter.data = parameter.data + 0.25
    assert_same_weights(ours, plain)


def test_parts_on_the_host_are_copies_and_others_are_views() -> None:
    model = build(small())
    places = {parameter.data_ptr() for parameter in model.parameters()}
    held = {on_host: local(model, on_host=on_host).param_groups for on_host in (True, False)}
    assert not places & {part.data_ptr() for group in held[True] for part in group["params"]}
    assert places == {part.data_ptr() for group in held[False] for part in group["params"]}


def test_parameters_stay_where_they_are() -> None:
    model = build(small())
    optimizer, places = local(model), [parameter.data_ptr() for parameter in model.parameters()]
    for step in range(2):
        train_step(model, optimizer, step)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("on_host", [True, False])
def test_loaded_state_continues_as_if_nothing_had_happened(on_host: bool) -> None:
    first, second = build(small()), build(small(), seed=4)
    optimizer, other = local(first, on_host=on_host), local(second, on_host=on_host)
    for step in range(3):
        train_step(first, optimizer, step)
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        for kind, value in optimizer.state_of(theirs).items():
            other.room_for(ours, kind, value.ndim > 0, value.dtype).copy_(value)
    for step in range(3, 6):
        train_step(first, optimizer, step)
        train_step(second, other, step)
        assert_same_weights(first, second)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)


def test_bytes_of_state_are_two_moments() -> None:
    model = build(small())
    optimizer = local(model)
    assert state_bytes(optimizer) == 0
    train_step(model, optimizer, 0)
    assert state_bytes(optimizer) == 2 * sum(parameter.nbytes for parameter in model.parameters())


def test_gradients_are_dropped() -> None:
    model = build(small())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    optimizer = local(model)
    optimizer.step()
    assert all(part.grad is None for group in optimizer.param_groups for part in group["params"])
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizer_that_needs_whole_parameters_is_refused_with_alternatives(kind: Any) -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ConfigError) as caught:
        LocalOptimizer([{"params": [weight]}], kind, on_host=True)
    said = str(caught.value)
    assert said.startswith(f"{kind.__name__} is not known to change every element by itself, so that it cannot be ")
    assert "use zero=0, tp=1 and ep=1 without offload, or one of AdamW, Adam, SGD" in said
    with pytest.raises(ConfigError, match=f"{kind.__name__} is not known to change every element"):
        parallelize(nn.Linear(2, 2), "offload=optimizer").optimizer(kind)
    assert isinstance(parallelize(nn.Linear(2, 2), "dp=1").optimizer(kind), kind)


def test_strategy_says_where_the_state_lives() -> None:
    plain = parallelize(nn.Linear(2, 2), "dp=1").optimizer(torch.optim.AdamW, lr=0.5)
    assert type(plain) is torch.optim.AdamW
    assert plain.param_groups[0]["lr"] == 0.5
    offloaded = parallelize(nn.Linear(2, 2), "offload=optimizer").optimizer(torch.optim.AdamW, lr=0.5)
    assert isinstance(offloaded, LocalOptimizer)
    assert offloaded.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("strategy", ["dp=1", "offload=optimizer"])
def test_parameters_are_taken_as_all_or_some_or_groups(strategy: str) -> None:
    def sizes(groups: Any) -> list[list[int]]:
        model = parallelize(layer, strategy)
        optimizer = model.optimizer(torch.optim.SGD, groups, lr=0.1)
        return [[part.numel() for part in group["params"]] for group in optimizer.param_groups]

    layer = nn.Linear(3, 2)
    assert sizes(None) == [[6, 2]]
    assert sizes(parameter for parameter in [layer.bias]) == [[2]]
    assert sizes([{"params": [layer.weight], "lr": 0.2}, {"params": [layer.bias]}]) == [[6], [2]]


@pytest.mark.parametrize("on_host", [True, False])
def test_schedules_of_torch_reach_the_optimizer_that_works(on_host: bool) -> None:
    ours, plain = build(small()), build(small())
    optimizer, expected = local(ours, on_host=on_host), torch.optim.AdamW(groups_of(plain), **ADAMW)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in (optimizer, expected)]
    for step in range(4):
        train_step(ours, optimizer, step)
        train_step(plain, expected, step)
        for schedule in schedules:
            schedule.step()
        assert_same_weights(ours, plain)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 16] * 2


def test_state_that_was_saved_is_taken_up_and_learning_rates_still_reach_the_update() -> None:
    """Moments and rates go to the optimizer that does the work, also after a state was loaded."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2)]
    make = partial(torch.optim.AdamW, lr=0.1)
    first, plain = LocalOptimizer([{"params": [weights[0]]}], make, on_host=True), make([weights[1]])

    def step(optimizers: list[torch.optim.Optimizer], number: int) -> None:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.arange(6.0) - number
            optimizer.step()

    step([first, plain], 1)
    again = LocalOptimizer([{"params": [weights[0]]}], make, on_host=True)
    again.load_state_dict(first.state_dict())
    step([again, plain], 2)
    for optimizer in (again, plain):
        optimizer.param_groups[0]["lr"] = 0.5
    step([again, plain], 3)
    assert torch.equal(*weights)


def test_closures_and_late_groups_are_refused() -> None:
    optimizer = LocalOptimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}], torch.optim.AdamW, on_host=True)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="when it is made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
