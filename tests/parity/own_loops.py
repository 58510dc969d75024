"""Loops of one's own that tests run on one device and on ranks: models, data, the loop itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.checkpoint.training_state import state_tensors
from meshwright.comm.travel import Travel
from meshwright.models.parts import whole
from meshwright.parallel import parallelize
from meshwright.parallel.batch_sampler import BatchSampler, cut_evenly
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.units import units_of
from meshwright.parallel.world import World
from meshwright.strategy import Strategy


class Convolutions(nn.Module):
    """A classifier of small images with BatchNorm, also in layers that may be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x.mean((2, 3))))


def synchronised() -> nn.Module:
    """The same with torch's own class for statistics of all ranks, whose sums are for GPUs."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions())


class Branches(nn.Module):
    """An MLP with weights that no pass uses, some that only some samples use, and tied ones."""

    tensor_plan = {  # noqa: RUF012
        "start": "outputs-whole",
        "rare": "outputs-whole",
        "never": "outputs-whole",
        "blocks.*": "outputs-whole",
        "tied": "outputs-whole",
        "head": "outputs-whole",
    }

    def __init__(self) -> None:
        super().__init__()
        self.start, self.rare, self.never = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.blocks[0].weight
        self.head = nn.Linear(8, 6)
        self.chosen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x.flatten(1)[:, :12]))
        rows = x[:, 0] > 0.6
        self.chosen.append(bool(rows.any()))
        if self.chosen[-1]:
            x = x + rows[:, None] * torch.tanh(self.rare(x))
        for block in (*self.blocks, self.tied):
            x = x + torch.tanh(block(x))
        return self.head(x)[:, :5]


class Skips(nn.Module):
    """Whole layers that only some samples use: the second, the last two, or the first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 5)
        self.chosen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x.flatten(1)[:, :12]))
        for index, block in enumerate(self.blocks):
            rows = x[:, index] > 0.5 if index in (0, 1, 4, 5) else torch.ones_like(x[:, 0], dtype=torch.bool)
            if index == 1:
                self.chosen.append(bool(rows.any()))
            if bool(rows.any()):
                x = x + rows[:, None] * torch.tanh(block(x))
        return self.head(x)


class Staged(nn.Module):
    """Layers with a BatchNorm, which a pipeline may cut apart; what no pass uses is in them, and beside them."""

    pipeline_plan = ("start", "blocks.*", "head", "never")

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.head, self.never = nn.Linear(8, 5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x.flatten(1)[:, :12]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.used, self.never = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(self.norm(x)))


MODELS = {"convolutions": Convolutions, "branches": Branches, "skips": Skips, "staged": Staged}


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held: dict[str, Tensor] = field(default_factory=dict)
    """Weights and buffers."""
    without_state: set[str] = field(default_factory=set)
    """Parameters of which the optimizer knows nothing."""
    chosen: list[bool] = field(default_factory=list)
    """In which passes this rank's samples used what some do."""
    in_stages: bool = False


def images(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 3, 4, 4, generator=draw, dtype=torch.float64), torch.randint(5, (count,), generator=draw)
    )


def loss_of(model: Any, pictures: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pictures), labels)


def inputs(seed: int, samples: int) -> dict[str, Tensor]:
    """For `meshwright verify`, as `loss` is."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "pictures": torch.randn(samples, 3, 4, 4, generator=draw),
        "labels": torch.randint(5, (samples,), generator=draw),
    }


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch["pictures"], batch["labels"])


def make(
    kind: str,
    strategy: str,
    seed: int = 0,
    together: int | None = None,
    device: torch.device | str = "cpu",
    travel: Travel | None = None,
) -> Parallel:
    """Layers are gathered together until they have `together` parameters; a million where nothing is said."""
    torch.manual_seed(seed)
    units = units_of if together is None else partial(units_of, least=together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "units_of", units)
        return mw.parallelize(MODELS[kind]().double().to(device), strategy, travel=travel)


def train_plainly(world: World, kind: str, micro_steps: int = 1, samples: int = 22, batch: int = 8) -> Trace:
    """The same by torch alone, on one device; nothing but the order of the samples is ours."""
    torch.manual_seed(0)
    model = MODELS[kind]().double().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)
    dataset = images(samples)
    sampler = BatchSampler(dataset, batch, Strategy(), 0, shuffle=True, seed=3)
    trace = Trace()
    for _ in range(2):
        for pictures, labels in DataLoader(dataset, batch_sampler=sampler):
            total = 0.0
            pictures, labels = pictures.to(world.device), labels.to(world.device)
            for first, end in pairwise(cut_evenly(len(labels), micro_steps)):
                found = loss_of(model, pictures[first:end], labels[first:end]) * (end - first) / len(labels)
                found.backward()
                total += found.item()
            trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            trace.losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
    trace.held = {
        name: value.detach().cpu().clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    trace.without_state = {name for name, value in model.named_parameters() if value not in optimizer.state}
    return trace


def train(
    world: World,
    kind: str,
    strategy: str,
    micro_steps: int = 1,
    samples: int = 22,
    batch_size: int = 8,
    plain: bool = False,
    together: int | None = None,
) -> Trace:
    """Two epochs, the last batch of which is short, with workers that fetch ahead."""
    parallel = make(kind, strategy, world.rank, together, world.device)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-6)
    dataset = images(samples)
    loader = DataLoader(dataset, batch_sampler=parallel.batch_sampler(dataset, batch_size, shuffle=True, seed=3))
    trace = Trace()
    for _ in range(2):
        for batch in loader:
            pictures, labels = (part.to(world.device) for part in batch)
            if plain:
                loss = parallel.backward(loss_of(parallel, pictures, labels))
            else:
                loss = parallel.backward(loss_of, pictures, labels, micro_steps=micro_steps)
            trace.norms.append(float(parallel.step(optimizer, clip=0.5)))
            trace.losses.append(float(loss))
    finish(trace, parallel, optimizer)
    return trace


def finish(trace: Trace, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    parallel.reshard()
    module = parallel.module
    trace.held = {name: whole(value.detach()).cpu().clone() for name, value in module.named_parameters()}
    trace.held |= {name: value.cpu().clone() for name, value in module.named_buffers()}
    trace.chosen = getattr(module, "chosen", [])
    trace.in_stages = parallel.pipeline is not None
    known = {name for name in state_tensors(module, optimizer) if name.startswith("optimizer.")}
    trace.without_state = {
        name for name, _ in module.named_parameters() if not any(one.endswith(f".{name}") for one in known)
    }


def go_on(
    world: World, kind: str, strategy: str, folder: str, first: int, last: int, compress_after: int | None = None
) -> Trace:
    """Steps [first, last) of one training, from the checkpoint of step `first`, with one at the end.

    All batches of an epoch are fetched ahead.
    """
    parallel = make(kind, strategy, seed=world.rank + 7 * first, travel=Travel(compress_after=compress_after))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-6)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dataset = images(22)
    sampler = parallel.batch_sampler(dataset, 8, shuffle=True, seed=3)
    state = parallel.load(folder, optimizer, must_exist=first > 0)
    if state:
        assert state["step"] == first
        sampler.load_state_dict(state["sampler"])
        schedule.load_state_dict(state["schedule"])
    loader = DataLoader(dataset, batch_sampler=sampler)
    trace, step = Trace(), first
    while step < last:
        for pictures, labels in list(loader):
            trace.losses.append(float(parallel.backward(loss_of, pictures, labels, micro_steps=2)))
            trace.norms.append(float(parallel.step(optimizer, clip=0.5)))
            schedule.step()
            step += 1
            if step == last:
                break
    parallel.save(folder, optimizer, step=step, sampler=sampler.state_dict(), schedule=schedule.state_dict())
    finish(trace, parallel, optimizer)
    return trace


def assert_same(found: Trace, expected: Trace, held: bool = True) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.norms == pytest.approx(expected.norms, rel=1e-9)
    # A pipeline's rank has some of it.
    assert found.held.keys() == expected.held.keys() or (found.in_stages and found.held.keys() < expected.held.keys())
    for name, value in found.held.items() if held else ():
        assert float((value.double() - expected.held[name].double()).abs().max()) < 1e-9, name
    assert found.without_state == expected.without_state & found.held.keys()
