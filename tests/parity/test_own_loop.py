"""A loop of one's own under strategies: its passes and steps are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.cli.main import main
from meshwright.config import PrecisionSection
from meshwright.errors import ConfigError, UserError
from meshwright.launch.local import RankError
from meshwright.models.initialize import build
from meshwright.models.parts import local_of
from meshwright.parallel.precision import Precision
from meshwright.parallel.world import World
from meshwright.training.loss_scale import LossScale
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS
from tests.parity.own_loops import (
    Trace,
    assert_same,
    images,
    loss_of,
    make,
    train,
    train_plainly,
)

CASES = [
    ("convolutions", "dp=1", 2),
    ("branches", "dp=1", 2),
    ("convolutions", "dp=2", 2),
    ("convolutions", "dp=2 recompute=full", 1),
    ("convolutions", "dp=2 shares=3+1", 2),
    ("convolutions", "dp=2 zero=1", 1),
    ("convolutions", "dp=2 zero=2 recompute=selective", 2),
    ("convolutions", "dp=2 zero=3", 2),
    ("convolutions", "dp=4 zero=3 replicate=2", 3),
    ("branches", "dp=2", 1),
    ("branches", "dp=2", 2),
    ("branches", "dp=2 zero=1", 2),
    ("branches", "dp=2 zero=2", 2),
    ("branches", "dp=2 zero=3", 1),
    ("branches", "dp=2 zero=3 wrap=block", 2),
    ("branches", "dp=4 zero=2 replicate=2", 3),
    ("branches", "dp=1 tp=2", 2),
    ("branches", "dp=2 tp=2", 1),
    ("branches", "dp=2 zero=3 tp=2", 2),
    ("staged", "dp=2 zero=3 wrap=block", 2),
    ("staged", "dp=1 pp=2", 2),
    ("staged", "dp=2 pp=2 zero=2", 2),
    ("staged", "dp=2 pp=2 zero=3 recompute=full schedule=interleaved:2", 2),
]


@pytest.mark.parametrize(("kind", "strategy", "micro_steps"), CASES)
def test_loop_trains_as_on_one_device(kind: str, strategy: str, micro_steps: int, pool: RankPool) -> None:
    (expected,) = pool.run(train_plainly, 1, kind, micro_steps)
    ranks = mw.Strategy.fewest_processes(strategy)
    for found in pool.run(train, ranks, kind, strategy, micro_steps):
        assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=3"])
def test_loss_that_is_computed_already_goes_back_alike(strategy: str, pool: RankPool) -> None:
    """The last batch of an epoch has five samples, three of them on the first rank."""
    (expected,) = pool.run(train_plainly, 1, "convolutions", 1, 21)
    for found in pool.run(train, 2, "convolutions", strategy, 1, 21, 8, True):
        assert_same(found, expected)


def train_in_fp16(world: World, strategy: str) -> list[tuple[float, float, bool]]:
    """Losses, scales, and whether the weights have moved; the loss is in fp16, too."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).to(world.device)
    parallel = mw.parallelize(model, strategy, precision=Precision(param=torch.float16))
    parallel.loss_scale = LossScale(PrecisionSection(initial_power=22, hysteresis=1), active=True)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    pictures, labels = (part.to(world.device) for part in images(8).tensors)
    mine = slice(None, None, parallel.strategy.dp) if world.rank == 0 else slice(1, None, 2)
    inputs = pictures.flatten(1)[:, :12].half()[mine]
    found = []
    for _ in range(12):
        before = [local_of(part.detach()).clone() for part in model.parameters()]
        loss = parallel.backward(lambda net, x, y: F.cross_entropy(net(x), y), inputs, labels[mine], micro_steps=2)
        parallel.step(optimizer, clip=1.0)
        after = [local_of(part.detach()) for part in model.parameters()]
        moved = any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
        found.append((float(loss), parallel.loss_scale.value, moved))
    return found


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=1", "dp=2 zero=3"])
def test_overflow_of_fp16_skips_the_step_on_all_ranks_alike(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_in_fp16, 1, "dp=1")
    for found in pool.run(train_in_fp16, 2, strategy):
        assert [one[1:] for one in found] == [one[1:] for one in expected]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], rel=1e-2)
    moved = [one[2] for one in expected]
    assert not moved[0]
    assert moved[-1]


def train_by_optimizer(world: World, strategy: str) -> tuple[Trace, list[int]]:
    """Two epochs without clipping, the optimizer's own step behind `backward`; gives how far the data had gone too."""
    parallel = make("branches", strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-6)
    dataset, trace, places = images(22), Trace(), []
    sampler = parallel.batch_sampler(dataset, 8, shuffle=True, seed=3)
    for _ in range(2):
        for pictures, labels in list(DataLoader(dataset, batch_sampler=sampler)):
            trace.losses.append(float(parallel.backward(loss_of, pictures, labels, micro_steps=2)))
            optimizer.step()
            optimizer.zero_grad()
            places.append(sampler.state_dict()["position"])
    assert parallel.loop.steps == 6
    return trace, places


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=1", "dp=2 zero=3"])
def test_step_of_the_optimizer_moves_the_data_too(strategy: str, pool: RankPool) -> None:
    ((expected, _),) = pool.run(train_by_optimizer, 1, "dp=1")
    for found, places in pool.run(train_by_optimizer, 2, strategy):
        assert found.losses == pytest.approx(expected.losses, rel=1e-9)
        assert places == [8, 16, 0, 8, 16, 0]


@pytest.mark.parametrize(
    ("shape", "precision", "told"),
    [("gqa", Precision(param=torch.float16), "with fp16 the gradients"), ("experts", None, "experts are balanced")],
)
def test_step_of_the_optimizer_is_refused_where_it_would_not_do(
    shape: str, precision: Precision | None, told: str
) -> None:
    parallel = mw.parallelize(build(SPECS[shape], seed=3).train(), "dp=1", precision=precision)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    ids = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(0))
    parallel.backward(lambda net, ids: mw.cross_entropy(net(ids[:, :-1]), ids[:, 1:]), ids)
    with pytest.raises(UserError, match=told):
        optimizer.step()
    parallel.step(optimizer)


def train_decoder(world: World, shape: str, strategy: str, reduction: Any = "mean") -> list[tuple[float, float]]:
    model = build(SPECS[shape], seed=3, dtype=torch.float64).train()
    parallel = mw.parallelize(model, strategy, reduction=reduction)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)

    def loss_of_tokens(net: Any, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        return mw.cross_entropy(net(ids[:, :-1]), net.own_tokens(ids[:, 1:]))

    found = []
    for step in range(3):
        ids = torch.randint(67, (8, 17), generator=torch.Generator().manual_seed(step))
        mine = {"ids": ids[parallel.data_rank :: parallel.strategy.dp]}
        loss = parallel.backward(loss_of_tokens, mine, micro_steps=2)
        found.append((float(loss), float(parallel.step(optimizer, clip=0.5))))
    return found


@pytest.mark.parametrize(
    ("shape", "strategy", "reduction"),
    [
        ("gqa", "dp=2 zero=2", "sum"),
        ("gqa", "dp=1 cp=2", "mean"),
        ("gqa", "dp=2 cp=2 zero=3", "mean"),
        ("gqa", "dp=2 cp=2", "sum"),
        ("gqa", "dp=2 tp=2", "mean"),
        ("gqa", "dp=2 pp=2 zero=2", "sum"),
        ("gqa", "dp=1 tp=2 pp=2", "mean"),
        ("experts", "dp=2", "mean"),
        ("experts", "dp=2 ep=2 zero=2", "sum"),
    ],
)
def test_decoder_in_an_own_loop_trains_as_on_one_device(
    shape: str, strategy: str, reduction: str, pool: RankPool
) -> None:
    (expected,) = pool.run(train_decoder, 1, shape, "dp=1")
    for found in pool.run(train_decoder, mw.Strategy.fewest_processes(strategy), shape, strategy, reduction):
        assert [number for pair in found for number in pair] == pytest.approx(
            [number for pair in expected for number in pair], rel=1e-9
        )


def go_back_through_a_pipeline(world: World) -> None:
    parallel = mw.parallelize(build(SPECS["gqa"]), "pp=2")
    parallel.backward(torch.zeros((), requires_grad=True))


def test_computed_loss_of_a_pipeline_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="cannot go back through a pipeline's stages"):
        pool.run(go_back_through_a_pipeline, 2)


PROVED = [
    ("Convolutions", "dp=2"),
    ("Convolutions", "dp=2 zero=3"),
    ("Branches", "dp=2"),
    ("Branches", "dp=2 zero=1"),
    ("Branches", "dp=2 zero=2"),
    ("Branches", "dp=2 zero=3"),
    ("Branches", "dp=1 tp=2"),
    ("Staged", "dp=1 pp=2"),
    ("Staged", "dp=2 pp=2 zero=2"),
]


@pytest.mark.parametrize(("model", "strategy"), PROVED)
def test_verify_proves_it(model: str, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"tests.parity.own_loops:{model}", "--parallel", strategy, "--steps", "3", "--json"]
    assert main(["verify", *arguments]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("model", ["Convolutions", "Branches"])
def test_verify_gives_numbers_in_the_dtype_that_is_computed_in(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"tests.parity.own_loops:{model}", "--parallel", "dp=2", "--precision", "bf16"]
    assert main(["verify", *arguments, "--steps", "2"]) == 0, capsys.readouterr().out


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))


def test_parameter_without_dimensions_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for zero in (1, 2, 3):
        with pytest.raises(ConfigError, match=r"and factor has none; give it the shape \(1,\), or use zero=0"):
            mw.parallelize(Scalar(), f"dp=2 zero={zero}")


@pytest.mark.parametrize("zero", [2, 3])
def test_parameter_that_does_not_lie_in_one_row_is_refused_by_name(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(nn.Conv2d(3, 6, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"0\.weight does not .*make it \.contiguous\(\) .*or use zero=0 or 1"):
        mw.parallelize(model, f"dp=2 zero={zero}")
