"""Modules of one's own, cut into the stages of a pipeline by their plan: what one process computes, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import UserError
from meshwright.models.parts import whole
from meshwright.parallel.own_loss import OwnLoss
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool


class Mlp(nn.Module):
    """Widths that differ, and a function without parameters between the layers."""

    pipeline_plan = ("layers.*", "head")

    def __init__(self) -> None:
        super().__init__()
        widths = (6, 12, 20, 8, 10)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Layer(nn.Module):
    """Takes what it works on by name and after something else, gives two things."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(6, 6)

    def forward(self, scale: float, mask: Tensor, *, x: Tensor) -> tuple[Tensor, int]:
        return x + scale * torch.tanh(self.inner(x)) * mask, self.number


class Tied(nn.Module):
    """The head shares the embedding's weight, and has a bias of its own; code asks layers for their numbers."""

    pipeline_plan = ("embed", "layers.*", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0, 1]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x.abs().long().clamp(max=5)).mean(1)
        x *= 2
        for layer in self.layers:
            x, _ = layer(1 + layer.number, self.mask, x=x)
        return {"out": self.head(x)[:, :2]}


MODELS = {"mlp": Mlp, "tied": Tied}


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    out = model(x)
    return F.mse_loss(out["out"] if isinstance(out, dict) else out, y) / 3


def train(world: World, kind: str, strategy: str, frozen: str = "") -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    seen = []
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, width, generator=draw, dtype=torch.float64) for width in (6, 2))
        mine = [
            tuple(part.chunk(parallel.strategy.dp)[parallel.data_rank] for part in micro)
            for micro in zip(x.chunk(3), y.chunk(3), strict=True)
        ]
        total = sum(parallel.passes(loss_of, mine), torch.zeros((), dtype=torch.float64))
        norm = parallel.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(world.sum(total)) * parallel.strategy.pp / world.size, float(norm)))
    found = parallel.forward([{"x": x}], lambda out, _: out["out"] if isinstance(out, dict) else out)
    return seen, {name: whole(value.detach()) for name, value in parallel.named_parameters()}, found


def assert_alike(found: list[Any], expected: Any) -> None:
    for seen, weights, outputs in found:
        assert torch.tensor(seen).numpy() == pytest.approx(torch.tensor(expected[0]).numpy(), rel=1e-9)
        for name, value in weights.items():
            assert torch.allclose(value, expected[1][name], rtol=0, atol=1e-9), name
        for output in outputs:
            assert torch.allclose(output, expected[2][0], rtol=0, atol=1e-9)
    assert {name for _, weights, _ in found for name in weights} == set(expected[1])
    assert any(outputs for _, _, outputs in found)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("pp=2", 2),
        ("pp=4", 4),
        ("pp=2 layers=1+3", 2),
        ("pp=2 layers=balanced", 2),
        ("pp=2 schedule=gpipe", 2),
        ("pp=2 schedule=interleaved:2", 2),
        ("pp=2 schedule=zero-bubble", 2),
        ("pp=2 schedule=zbv", 2),
        ("dp=2 pp=2", 4),
        ("dp=2 pp=2 zero=1", 4),
        ("dp=2 pp=2 zero=2 schedule=zbv wrap=block", 4),
        ("dp=2 pp=2 zero=3 schedule=interleaved:2 wrap=block", 4),
        ("pp=2 recompute=full", 2),
    ],
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_module_trains_as_on_one_device(kind: str, strategy: str, ranks: int, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, kind, "dp=1")
    assert_alike(pool.run(train, ranks, kind, strategy), expected)


@pytest.mark.parametrize("strategy", ["pp=2", "pp=2 schedule=zero-bubble"])
def test_a_first_stage_that_is_frozen_stays(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, "mlp", "dp=1", "layers")
    assert_alike(pool.run(train, 2, "mlp", strategy, "layers"), expected)


def held(world: World) -> list[str]:
    parallel = mw.parallelize(Tied(), "pp=2")
    return sorted(parallel.module.state_dict())


def test_a_rank_holds_its_own_stage_and_what_it_shares(pool: RankPool) -> None:
    first, last = pool.run(held, 2)
    assert [name for name in first if "layers" not in name] == ["embed.weight", "head.weight", "mask"]
    assert [name for name in last if "layers" not in name] == ["embed.weight", "head.bias", "head.weight", "mask"]
    assert {name.split(".")[1] for name in first if "layers" in name} == {"0", "1"}


def noisy(world: World, strategy: str) -> Any:
    torch.manual_seed(3)
    model = Mlp().double()
    parallel = mw.parallelize(model, strategy)
    torch.manual_seed(5)

    def loss(model: Any, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        out: Tensor = model(x + noise)
        return (out.sum(1) - noise.sum(1)).square().mean()

    losses = parallel.passes(loss, [torch.ones(2, 6, dtype=torch.float64)] * 3)
    return [float(loss) for loss in losses], float(parallel.grad_norm())


def test_a_loss_that_draws_numbers_draws_the_same_on_all_stages(pool: RankPool) -> None:
    (expected,) = pool.run(noisy, 1, "dp=1")
    first, last = pool.run(noisy, 2, "pp=2")
    assert last[0] == pytest.approx(expected[0], rel=1e-9)
    assert first[1] == last[1] == pytest.approx(expected[1], rel=1e-9)
    assert first[0] == []


def misused(world: World, how: str) -> str:
    parallel = mw.parallelize(Mlp(), "pp=2")
    x = torch.ones(2, 6)
    try:
        if how == "by itself":
            parallel(x)
        else:
            parallel.passes(lambda model, x: model.module(x).sum(), [x])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("past", "a rank of a pipeline cannot be called by itself"),
        ("by itself", "a pipeline's ranks cannot be called one by one"),
    ],
)
def test_a_stage_is_not_called_by_itself(how: str, told: str, pool: RankPool) -> None:
    assert all(told in found for found in pool.run(misused, 2, how))


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda model, x: model(x) + model(x), "calls the model twice"),
        (lambda model, x: x.sum(), "does not call the model that it is given"),
    ],
)
def test_a_loss_that_a_pipeline_cannot_follow_is_refused(loss: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        OwnLoss(None, loss, [torch.ones(2)])(torch.ones(2), 0)
