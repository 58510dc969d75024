"""`parallelize` in a loop of one's own: any module under data parallel, decoders under all, from real weights."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.launch.local import RankError
from meshwright.models.initialize import build
from meshwright.models.parts import whole
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

Trace = tuple[list[float], dict[str, Tensor]]


class Foreign(nn.Module):
    """A model that knows nothing of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3))
        self.head = nn.Linear(16, 31)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_foreign(world: World, strategy: str) -> Trace:
    torch.manual_seed(world.rank)  # Other weights on every rank: those of the first one count.
    model = Foreign().double()
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(4):
        tokens = torch.randint(31, (2, 8, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(world.size, dim=1)[world.rank]
        total = 0.0
        for index, micro in enumerate(mine):
            with parallel.micro_step(last=index == 1):
                loss = F.cross_entropy(parallel(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten()) / 2
                loss.backward()
            total += loss.detach() / world.size
        losses.append(float(world.sum(total)))
        mw.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(value.detach()).clone() for name, value in model.named_parameters()}


def train_decoder(world: World, strategy: str) -> Trace:
    """Every rank sees all samples where matrices alone are split."""
    model = build(SPECS["tied"], seed=3 + world.rank, dtype=torch.float64).train()
    parallel = mw.parallelize(model, strategy)
    # A loop may bring its own optimizer: parameters are DTensors, which torch's know.
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(4):
        tokens = torch.randint(67, (4, 17), generator=torch.Generator().manual_seed(step))
        loss = mw.cross_entropy(parallel(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        mw.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(value.detach()).clone() for name, value in model.named_parameters()}


def assert_same(found: Trace, expected: Trace) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert float((found[1][name] - weight).abs().max()) < 1e-9, name


@pytest.mark.parametrize("strategy", ["dp=2", "zero=1", "zero=2", "zero=3", "zero=3 wrap=name:blocks.0+2"])
def test_foreign_model_trains_as_on_one_device(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_foreign, 1, "dp=1")
    for found in pool.run(train_foreign, 2, strategy):
        assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2 sp=off", "tp=2 recompute=full"])
def test_decoder_with_weights_is_split_and_trains_as_on_one_device(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_decoder, 1, "dp=1")
    for found in pool.run(train_decoder, 2, strategy):
        assert_same(found, expected)


def refused_before_a_group(world_size: int, model: nn.Module, strategy: str) -> str:
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        with pytest.raises(ConfigError) as caught:
            mw.parallelize(model, strategy)
    finally:
        del os.environ["WORLD_SIZE"]
    assert not torch.distributed.is_initialized()
    return str(caught.value)


def test_what_a_model_cannot_take_is_refused_before_a_process_group_is_made() -> None:
    assert "tensor_plan" in refused_before_a_group(2, Foreign(), "tp=2")
    assert "call an attribute `attend`" in refused_before_a_group(2, Foreign(), "cp=2")
    decoder = build(SPECS["gqa"])
    assert "tp can be 1, 2, 4, 8" in refused_before_a_group(3, decoder, "tp=3")
    assert "tp=4 does not divide 6 processes" in refused_before_a_group(6, decoder, "tp=4")
    decoder.model.extra = nn.Parameter(torch.zeros(3))
    assert "covers the parameter model.extra" in refused_before_a_group(2, decoder, "tp=2")
    assert "pp needs to know in which order Foreign calls its parts" in refused_before_a_group(2, Foreign(), "pp=2")
    assert "Foreign has none; leave ep out" in refused_before_a_group(2, Foreign(), "dp=2 ep=2")
    assert "needs dp or cp of at least 2" in refused_before_a_group(2, Foreign(), "dp=2 offload=parameters")
    assert "has no module 'nowhere'" in refused_before_a_group(2, Foreign(), "zero=3 wrap=name:nowhere")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"blox.*": "region"}, "has a row 'blox.*', and no module of that name"),
        ({"blocks.*": "heads:3"}, "cannot deal out the 3 heads of blocks.0"),
        ({"blocks.*": "columns"}, "has no rule 'columns'"),
        ({"blocks.*": "region"}, "covers the parameter blocks.0.weight"),
    ],
)
def test_table_that_cannot_be_followed_is_refused(row: dict[str, str], complaint: str) -> None:
    class Tabled(nn.Module):
        tensor_plan = {"embed": "vocabulary", **row}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    assert complaint in refused_before_a_group(2, Tabled(), "tp=2")


class Padded(nn.Module):
    """A table of one's own: regions, an embedding with a row that never learns, options by name, a shared layer."""

    tensor_plan = {  # noqa: RUF012
        "embed": "vocabulary",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "blocks.*": "region",
        "head": "head",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=9)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * scale


def train_padded(world: World, strategy: str) -> Trace:
    torch.manual_seed(1)
    model = Padded().double()
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses = []
    for step in range(3):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = mw.cross_entropy(parallel(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, {name: whole(value.detach()).clone() for name, value in parallel.named_parameters()}


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2 recompute=full", "tp=2 offload=optimizer"])
def test_model_with_a_table_of_its_own_trains_as_on_one_device(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_padded, 1, "dp=1")
    for found in pool.run(train_padded, 2, strategy):
        assert_same(found, expected)


def first_gradients(world: World, strategy: str, reduction: str) -> float:
    """The norm of the first gradient of a mixture whose balancing loss weighs much."""
    spec = SPECS["experts"]
    assert spec.experts is not None
    spec = spec.model_copy(update={"experts": spec.experts.model_copy(update={"router_aux_loss_coef": 1.0})})
    model = build(spec, seed=2, dtype=torch.float64).train()
    parallel = mw.parallelize(model, strategy, reduction=reduction)
    tokens = torch.randint(67, (4, 17), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(parallel.strategy.dp)[parallel.data_rank]
    loss = mw.cross_entropy(parallel(mine[:, :-1]), mine[:, 1:], "sum")
    (loss / (16 * (4 if reduction == "sum" else len(mine)))).backward()
    return float(mw.clip_grad_norm_(parallel.parameters(), 0.0))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("strategy", ["dp=2", "zero=3", "tp=2"])
def test_balancing_loss_counts_once_however_gradients_are_reduced(
    strategy: str, reduction: str, pool: RankPool
) -> None:
    (expected,) = pool.run(first_gradients, 1, "dp=1", "mean")
    for found in pool.run(first_gradients, 2, strategy, reduction):
        assert found == pytest.approx(expected, rel=1e-9)


def drop_without_samples(world: World) -> None:
    parallel = mw.parallelize(build(SPECS["gpt"]).train(), "tp=2")
    parallel(torch.zeros(1, 8, dtype=torch.int64))


def test_dropout_on_split_matrices_needs_the_samples(pool: RankPool) -> None:
    with pytest.raises(RankError, match="give the model `samples_B`"):
        pool.run(drop_without_samples, 2)


def test_optimizer_that_cannot_shard_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="Adafactor is not known to change every element by itself"):
        pool.run(make_adafactor, 2)


def make_adafactor(world: World) -> None:
    mw.parallelize(Foreign(), "zero=1").optimizer(torch.optim.Adafactor, lr=1e-2)


def odd_sequence(world: World) -> None:
    parallel = mw.parallelize(build(SPECS["gqa"]).train(), "tp=2")
    parallel(torch.zeros(1, 7, dtype=torch.int64))


def test_sequence_that_cannot_be_dealt_out_is_named(pool: RankPool) -> None:
    with pytest.raises(RankError, match="a sequence of 7 tokens cannot be dealt out to tp=2 ranks"):
        pool.run(odd_sequence, 2)


def disagree(world: World) -> None:
    torch.distributed.all_reduce(torch.zeros(3 + world.rank))


def test_ranks_that_disagree_end_in_an_error_that_says_so(pool: RankPool) -> None:
    with pytest.raises(RankError, match="Detected mismatch between collectives"):
        pool.run(disagree, 2)


def peak_of_building(world: World, strategy: str, layers: int) -> tuple[int, int]:
    """(bytes by which this process grew at most, bytes of the whole model) while a model is made and filled."""
    from meshwright.models.initialize import build_meta, initialize, materialise
    from meshwright.models.spec import ModelSpec

    spec = ModelSpec(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    model = build_meta(spec)
    size = sum(parameter.nbytes for parameter in model.parameters())
    # What the process that ranks are forked from has freed, and not given back, would hide what this takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    parallel = mw.parallelize(model, strategy, reduction="sum")
    materialise(model, "cpu")
    initialize(model, spec, seed=0)
    del parallel
    return resident("VmHWM") - before, size


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(kind)]
    return int(kilobytes) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "share"), [("zero=3", 0.25), ("tp=4", 0.25), ("zero=2 tp=2", 0.25), ("dp=4", 1)])
def test_no_rank_ever_holds_more_than_its_share_while_a_model_is_made(strategy: str, share: float) -> None:
    # Ranks of its own: memory that earlier work has freed would hide what this one takes.
    with RankPool(4) as ranks:
        ranks.run(peak_of_building, 4, strategy, 1)
        for grown, size in ranks.run(peak_of_building, 4, strategy, 12):
            assert size > 150_000_000
            assert share * size - 16_000_000 < grown < share * size + 16_000_000


class Mixed(nn.Module):
    """Parameters of two dtypes, the narrow one first."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.linspace(0, 1, 6).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.linspace(0, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.wide).sum() + self.narrow.double().sum()


def update_of_two_dtypes(world: World, strategy: str) -> Tensor:
    parallel = mw.parallelize(Mixed(), strategy)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=1e-3)
    parallel(torch.linspace(1, 2, 6, dtype=torch.float64)).backward()
    optimizer.step()
    return parallel.module.wide.detach().clone()  # type: ignore[union-attr]


def test_rows_of_several_dtypes_are_gathered_without_rounding(pool: RankPool) -> None:
    (alone,) = pool.run(update_of_two_dtypes, 1, "auto")
    for found in pool.run(update_of_two_dtypes, 2, "dp=2 zero=1"):
        assert torch.equal(found, alone)
