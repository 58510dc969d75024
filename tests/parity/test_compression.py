"""Compressed gradients on real ranks: nothing is lost, all ranks get the same, what is sent is what is promised."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.reader import CheckpointReader, load_whole
from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.compression import Compression, ring
from meshwright.comm.compressors import Bucket, Compressor, compressor
from meshwright.comm.sums import sum_over
from meshwright.comm.transfers import together
from meshwright.comm.travel import BACKEND
from meshwright.config import load_config
from meshwright.faults import parse_faults
from meshwright.parallel.world import World
from meshwright.trainer import Trainer
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

KINDS = ("fp16", "bf16", "int8", "powersgd:2", "topk:0.01")
SHAPES = ((48, 31), (31,), (29, 4, 17), (7,), (600, 64), (1,))
"""No number of elements that 2, 3 or 4 ranks or blocks of 256 divide."""


def made(kind: str, algorithm: str = BACKEND) -> Compressor:
    group = dist.group.WORLD
    assert group is not None
    return compressor(Compression.parse(kind), group, sum_over(group, algorithm))


def bucket_of(seed: int, dtype: torch.dtype = torch.float64) -> Bucket:
    """This rank's gradients of a step: large and small ones beside each other."""
    draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    sizes = [prod(shape) for shape in SHAPES]
    row = torch.randn(sum(sizes), generator=draw, dtype=torch.float64) ** 3
    flat = (row * torch.logspace(-6, 2, len(row), dtype=torch.float64)).to(dtype)
    gradients = [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]
    return Bucket(flat, gradients, [f"p{number}" for number in range(len(SHAPES))])


def summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def same_everywhere(tensor: Tensor) -> bool:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return all(torch.equal(row, rows[0]) for row in rows)


def reduce_often(world: World, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Eight steps: how far sums are off, alone and all together with what was not sent."""
    one = made(kind)
    found: dict[str, Any] = {"same": True, "errors": []}
    given = received = torch.zeros((), dtype=dtype)
    for step in range(8):
        bucket = bucket_of(step, dtype)
        exact = summed(bucket.flat)
        one(bucket)
        found["same"] &= same_everywhere(bucket.flat)
        found["errors"].append(float((bucket.flat - exact).norm() / exact.norm()))
        given, received = given + exact, received + bucket.flat
    if one.unsent:
        nothing = [torch.zeros(shape) for shape in SHAPES]
        rest = [one.unsent.get(name, zeros).view(-1) for name, zeros in zip(bucket.names, nothing, strict=True)]
        received = received + summed(torch.cat(rest).to(dtype))
    found["left"] = float((received - given).norm() / given.norm())
    found["sent"] = one.sent / 8
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "each"), [("fp16", 5e-3), ("bf16", 2e-2), ("int8", 3e-2), ("powersgd:2", 1.5), ("topk:0.01", 1.5)]
)
def test_sums_are_near_and_the_same_on_all_ranks(kind: str, each: float, ranks: int, pool: RankPool) -> None:
    for found in pool.run(reduce_often, ranks, kind, torch.float32):
        assert found["same"]
        assert max(found["errors"]) < each


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["powersgd:2", "topk:0.01"])
def test_what_was_not_sent_and_what_was_are_together_all_gradients(kind: str, ranks: int, pool: RankPool) -> None:
    for found in pool.run(reduce_often, ranks, kind, torch.float64):
        assert min(found["errors"]) > 1e-3
        assert found["left"] < 1e-12


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_closed_form(kind: str, ranks: int, pool: RankPool) -> None:
    promised = Compression.parse(kind).sent(SHAPES, ranks)
    for found in pool.run(reduce_often, ranks, kind, torch.float32):
        assert found["sent"] == promised


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_percent_of_the_largest_sends_less_than_five_percent_of_a_ring(ranks: int, pool: RankPool) -> None:
    dense = ring(sum(map(prod, SHAPES)), ranks, 4)
    for found in pool.run(reduce_often, ranks, "topk:0.01", torch.float32):
        assert found["sent"] < 0.05 * dense


def sent_by(world: World, kind: str, algorithm: str) -> list[int]:
    """Bytes that this rank says it sent for one sum, those that went out, and what gradients are uncompressed."""
    one = made(kind, algorithm)
    with pytest.MonkeyPatch.context() as patch:
        gone: list[int] = []

        def watched(outgoing: Sequence[tuple[Tensor, int]], *others: Any) -> Any:
            gone.extend(tensor.nbytes for tensor, _ in outgoing)
            return together(outgoing, *others)

        patch.setattr("meshwright.comm.all_reduce.together", watched)
        one(bucket_of(0, torch.float32))
    return [one.sent, sum(gone), one.whole(sum(map(prod, SHAPES)))]


@pytest.mark.parametrize("kind", ["powersgd:4", "bf16"])
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_bytes_of_an_algorithm_are_those_that_it_sent(algorithm: str, kind: str, pool: RankPool) -> None:
    rings, whole = Compression.parse(kind).sent(SHAPES, 3), ring(sum(map(prod, SHAPES)), 3, 4)
    found = pool.run(sent_by, 3, kind, algorithm)
    assert all(counted == gone > 0 for counted, gone, _ in found)
    if algorithm == "ps":
        # The server sends to both others what they send to it.
        for rank, (counted, _, uncompressed) in enumerate(found):
            assert counted == pytest.approx((0.75 if rank else 1.5) * rings, rel=1e-3)
            assert uncompressed == pytest.approx((0.75 if rank else 1.5) * whole, rel=1e-3)
    if algorithm == "ring":
        assert sum(counted for counted, _, _ in found) == pytest.approx(3 * rings, rel=1e-3)


def test_the_share_that_is_sent_is_of_what_the_algorithm_would_send(
    pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    given = ["comm.compress_after=1", "train.steps=2", "train.global_batch=6"]
    rows = {}
    for algorithm in ("backend", "ps"):
        folder = tmp_path / algorithm
        settings = settings_of(folder, corpus, "dp=3 compress=bf16", f"comm.allreduce={algorithm}", *given)
        pool.run(train, 3, settings)
        rows[algorithm] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The first rank writes them, which is the server.
    for one, other in zip(rows["backend"], rows["ps"], strict=True):
        assert other["sent_mib"] == pytest.approx(1.5 * one["sent_mib"], rel=1e-3)
        assert other["sent_share"] == pytest.approx(one["sent_share"], rel=1e-3)
    assert [row["sent_share"] for row in rows["ps"]] == [1.0, 0.5]


def meet_what_is_no_number(world: World, kind: str, bad: float) -> tuple[bool, bool, bool]:
    """Whether it reaches this rank, whether what was remembered stays, and whether the next sum is one."""
    one = made(kind)
    one(bucket_of(0, torch.float32))
    before = {name: rest.clone() for name, rest in one.unsent.items()}
    bucket = bucket_of(1, torch.float32)
    if world.rank == 1:
        bucket.gradients[4][3, 5] = bad
    one(bucket)
    reached = not bool(bucket.gradients[4].isfinite().all())
    kept = torch.equal(one.unsent["p4"], before["p4"]) if before else True
    after = bucket_of(2, torch.float32)
    one(after)
    return reached, kept, bool(after.flat.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_reaches_all_ranks_and_is_not_remembered(kind: str, bad: float, pool: RankPool) -> None:
    assert pool.run(meet_what_is_no_number, 3, kind, bad) == [(True, True, True)] * 3


def test_compression_begins_when_it_is_told_to(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, "dp=2 compress=topk:0.01", "comm.compress_after=2", "train.steps=3")
    pool.run(train, 2, settings)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["sent_share"] == 1.0 for line in lines] == [True, True, False]


def test_compression_that_does_not_begin_is_told(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, "dp=2 compress=int8", "comm.compress_after=2", "train.steps=2")
    (said, *_) = pool.run(train_and_hear, 2, settings)
    assert "comm.compress_after=2 is not before train.steps=2: nothing is compressed" in said


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_of_the_largest_train_as_one_process_does(ranks: int, prover: Prover) -> None:
    settings: dict[str, dict[str, object]] = {"comm": {"bucket_mb": 0.02, "compress_after": 0}}
    case = Case(SPECS["gqa"], f"dp={ranks} compress=topk:.9999999", ranks, micro_steps=2, batch=24, settings=settings)
    assert prover.differences(case) == []


SETTINGS = [
    "train.steps=6",
    "comm.compress_after=0",
    "data.sequence_length=32",
    "train.global_batch=4",
    "checkpoint.every=3",
    "observe.tensorboard=false",
]


def train(world: World, overrides: list[str], fault: str = "") -> None:
    world.pulse._faults = parse_faults(fault)
    Trainer(load_config(None, overrides), world).train()


def train_and_hear(world: World, overrides: list[str]) -> str:
    """What is printed meanwhile."""
    with redirect_stdout(io.StringIO()) as said:
        train(world, overrides)
    return said.getvalue()


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def settings_of(folder: Path, corpus: Path, strategy: str, *others: str) -> list[str]:
    model = [f"model.spec.{name}={value}" for name, value in _MODEL.items()]
    return [f"run.dir={folder}", f"data.path={corpus}", f"parallel.strategy={strategy}", *SETTINGS, *model, *others]


_MODEL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("kind", ["powersgd:2", "topk:0.05"])
def test_a_resumed_run_is_the_same_run(kind: str, pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    whole = settings_of(tmp_path / "whole", corpus, f"dp=2 compress={kind}")
    pool.run(train, 2, whole)
    halves = settings_of(tmp_path / "halves", corpus, f"dp=2 compress={kind}")
    with pytest.raises(Exception, match="injected fault"):
        pool.run(train, 2, halves, "step=4,phase=forward,kind=raise")
    pool.run(train, 2, halves)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_another_number_of_ranks_shares_what_was_not_sent(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pool.run(train, 2, settings_of(folder, corpus, "dp=2 compress=topk:0.05", "train.steps=3"))
    rows = load_whole(folder / "checkpoints" / "step-000003", "unsent.")
    assert all(len(row) == 2 and not torch.equal(row[0], row[1]) for row in rows.values())
    taken = pool.run(take_up, 4, settings_of(folder, corpus, "dp=4 compress=topk:0.05"))
    for name, row in rows.items():
        shares = [one[name.removeprefix("unsent.")] for one in taken]
        torch.testing.assert_close(sum(shares), row.sum(dim=0))
        assert torch.equal(shares[0], shares[3])


def take_up(world: World, overrides: list[str]) -> dict[str, Tensor]:
    trainer = Trainer(load_config(None, overrides), world)
    found = trainer.one_step.parallel.compressor
    assert found is not None
    return found.unsent


def test_a_run_that_sends_all_says_what_it_leaves_out(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pool.run(train, 2, settings_of(folder, corpus, "dp=2 compress=topk:0.05", "train.steps=3"))
    pool.run(train, 2, settings_of(folder, corpus, "dp=2"))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "unsent_dropped"] == [3]
    assert CheckpointReader(folder / "checkpoints" / "step-000006").manifest.step == 6


@pytest.mark.parametrize(
    ("strategy", "setting", "seen"),
    [
        ("dp=2 compress=int8", "comm.bucket_mb=1", {"all_to_all", "all_gather"}),
        ("dp=2", "comm.allreduce=ring", {"receive"}),
    ],
)
def test_profiles_see_what_a_thread_of_its_own_sends(
    strategy: str, setting: str, seen: set[str], pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    pool.run(train, 2, settings_of(tmp_path, corpus, strategy, setting, "observe.profile_every=3"))
    lines = [json.loads(line) for line in (tmp_path / "ranks" / "00001.jsonl").read_text().splitlines()]
    rows = [row for line in lines if line["kind"] == "collectives" for row in line["rows"]]
    assert seen <= {row["operation"] for row in rows if row["group"] == "dp" and row["bytes"] > 1000}


@pytest.mark.parametrize("kind", ["bf16", "int8", "powersgd:2", "topk:0.2"])
def test_narrow_weights_learn_with_it(kind: str, pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    narrow = ["train.precision=bf16", "precision.stored=bf16", "comm.compress_after=1", "train.lr=0.003"]
    pool.run(train, 2, settings_of(tmp_path, corpus, f"dp=2 compress={kind}", *narrow, "train.steps=12"))
    found = losses(tmp_path)
    assert found[12] < found[1] - 0.1


LEARNING = ["train.steps=60", "train.lr=0.01", "train.warmup_steps=5", "checkpoint.every=0", "observe.profile_every=0"]


def last_loss(folder: Path) -> float:
    """The mean of the last steps."""
    return fmean(list(losses(folder).values())[-10:])


@pytest.fixture(scope="module")
def uncompressed(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("uncompressed")
    pool.run(train, 2, settings_of(folder, corpus, "dp=2", *LEARNING))
    first = losses(folder)[1]
    assert last_loss(folder) < 0.7 * first
    return last_loss(folder)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        *((kind, "auto") for kind in ("fp16", "bf16", "int8", "powersgd:4", "topk:0.01")),
        ("powersgd:4", "40"),
        ("topk:0.05", "40"),
    ],
)
def test_the_loss_ends_within_two_percent(
    kind: str, after: str, uncompressed: float, pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    compressed = [f"comm.compress_after={after}", *LEARNING]
    pool.run(train, 2, settings_of(tmp_path, corpus, f"dp=2 compress={kind}", *compressed))
    assert last_loss(tmp_path) == pytest.approx(uncompressed, rel=0.02)


@pytest.mark.parametrize("kind", ["powersgd:2", "topk:0.05"])
def test_a_step_that_was_skipped_as_a_spike_does_not_come_back(
    kind: str, pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    guarded = ["elastic.spike=20", "elastic.spike_policy=skip", "elastic.spike_window=16", "train.steps=30"]
    settings = settings_of(tmp_path, corpus, f"dp=2 compress={kind}", *guarded)
    pool.run(train, 2, settings, "step=25,phase=forward,kind=spike:1000")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    norms = {line["step"]: line["grad_norm"] for line in lines}
    assert [line["step"] for line in lines if line.get("skipped")] == [25]
    assert max(norms[step] for step in range(26, 31)) < 5 * max(norms[step] for step in range(20, 25))
