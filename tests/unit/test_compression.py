"""Compression as data: what it sends, what it refuses, how buckets are sized; and finding the largest numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format import Manifest, TensorEntry
from meshwright.checkpoint.unsent import check_unsent
from meshwright.cli.main import main
from meshwright.comm.bandwidth import Line
from meshwright.comm.bucket_size import LEAST, best_bucket
from meshwright.comm.compression import Compression, ring
from meshwright.comm.compressors import KINDS, largest
from meshwright.config import RunConfig, load_config
from meshwright.errors import CheckpointError, ConfigError, UserError
from meshwright.models.presets import preset
from meshwright.planning.constraints import parse_constraints
from meshwright.strategy import COMPRESS, Strategy
from meshwright.training.planned import Planned, plan_ranks, plan_run
from meshwright.training.run_folder import RunFolder
from meshwright.training.travel import travel_of

MATRIX = ((4096, 4096),)


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "powersgd:4", "topk:0.01", "topk:1e-3"])
def test_a_strategy_is_written_as_it_is_read(kind: str) -> None:
    strategy = Strategy.parse(f"compress={kind}", 4)
    assert str(strategy) == f"dp=4 compress={kind}"
    assert Strategy.parse(str(strategy), 4) == strategy


def test_every_kind_that_can_be_written_can_be_run() -> None:
    assert {word.partition(":")[0] for word in COMPRESS} == {"none", *KINDS}


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("dp=2 compress=topk:0.01 zero=1", 2, "with zero=1"),
        ("dp=2 compress=int8 zero=3", 2, "with zero=3"),
        ("dp=1 tp=2 compress=int8", 2, "with tp=2"),
        ("dp=1 pp=2 compress=bf16", 2, "with pp=2"),
        ("dp=1 cp=2 compress=fp16", 2, "with cp=2"),
        ("dp=2 ep=2 compress=powersgd:2", 2, "with ep=2"),
        ("dp=2 compress=topk", 2, "F is a share, above 0 and below 1, such as topk:0.01"),
        ("dp=2 compress=topk:2", 2, "F is a share, above 0 and below 1"),
        ("dp=2 compress=topk:1", 2, "F is a share, above 0 and below 1"),
        ("dp=2 compress=topk:nan", 2, "F is a share, above 0 and below 1"),
        ("dp=2 compress=topk:1e-999", 2, "F is a share, above 0 and below 1"),
        ("dp=2 compress=powersgd:0", 2, "is not one of"),
        ("dp=2 compress=gzip", 2, "is not one of"),
    ],
)
def test_what_cannot_be_compressed_is_refused_with_the_reason(text: str, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Strategy.parse(text, ranks)


@pytest.mark.parametrize("kind", ["powersgd:2", "topk:0.1"])
def test_what_is_remembered_does_not_go_with_a_scale_that_changes(kind: str) -> None:
    strategy = Strategy.parse(f"dp=2 compress={kind}", 2)
    with pytest.raises(ConfigError, match="may be of another scale"):
        travel_of(load_config(None, ["train.precision=fp16"]), strategy)
    travel_of(load_config(None, ["train.precision=bf16"]), strategy)


def test_steps_before_compression_are_refused_where_nothing_is_compressed(tmp_path: Path) -> None:
    given = ["model.preset=tiny", "comm.compress_after=3", f"run.dir={tmp_path / 'run'}"]
    ways: list[Callable[[RunConfig], Planned]] = [
        lambda asked: plan_run(asked, 2),
        lambda asked: plan_ranks(asked, 2, 2),
    ]
    for text in ("dp=2", "dp=2 compress=none", "auto"):
        config = load_config(None, [*given, f"parallel.strategy={text}"])
        for ask in ways:
            with pytest.raises(ConfigError, match=r"comm\.compress_after=3 .* or leave comm\.compress_after out"):
                ask(config)
    compressed = load_config(None, [*given, "parallel.strategy=dp=2 compress=int8"])
    assert plan_run(compressed, 2).strategy == "dp=2 compress=int8"
    # Of a run that goes on without compression the setting cannot be changed.
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(compressed)
    whole = load_config(None, [*given, "parallel.strategy=dp=2"])
    assert plan_run(whole, 2).strategy == "dp=2"
    with pytest.raises(ConfigError, match="compresses none"):
        plan_run(load_config(None, [*given, "parallel.strategy=dp=2", "run.fresh=true"]), 2)


@pytest.mark.parametrize(
    ("text", "share"), [("topk:1%", "topk:0.01"), ("topk:12.5%", "topk:0.125"), ("topk:.1%", "topk:0.001")]
)
def test_a_percentage_is_told_as_a_share(text: str, share: str) -> None:
    with pytest.raises(ConfigError, match=f"write {re.escape(share)}$"):
        Strategy.parse(f"dp=2 compress={text}", 2)
    Strategy.parse(f"dp=2 compress={share}", 2)
    with pytest.raises(ConfigError, match=r"write budget:0\.5$"):
        Strategy.parse("dp=2 recompute=budget:50%", 2)
    for wrong in ("topk:100%", "topk:0%", "int8:1%"):
        with pytest.raises(ConfigError) as told:
            Strategy.parse(f"dp=2 compress={wrong}", 2)
        assert "write" not in str(told.value)


def test_a_plan_says_why_it_does_not_choose_compression() -> None:
    with pytest.raises(UserError, match=r"no plan chooses it by itself.*name the strategy: 'dp=N compress=int8'"):
        parse_constraints(["compress=int8"])


def test_what_sends_as_much_as_none_is_told() -> None:
    told = {
        kind: Compression.parse(kind).in_vain(MATRIX, 4)
        for kind in ("none", "fp16", "int8", "powersgd:4", "topk:0.01", "powersgd:99999", "topk:0.9")
    }
    assert [kind for kind, text in told.items() if text is not None] == ["powersgd:99999", "topk:0.9"]
    assert "sends 360% of what gradients are uncompressed" in str(told["topk:0.9"])
    assert "sends 100% of" in str(told["powersgd:99999"])
    assert Compression.parse("topk:0.9").in_vain(MATRIX, 1) is None
    assert Compression.parse("bf16").in_vain(MATRIX, 4, element=2) is not None


def test_a_plan_tells_of_compression_that_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "gpt2", "--cluster", "4xh100", "--seq-len", "1024", "--global-batch", "16"]
    for kind, told in (("topk:0.9", True), ("topk:0.01", False)):
        assert main([*asked, "--strategy", f"dp=4 compress={kind}"]) == 0
        assert ("sends 360% of what gradients are uncompressed" in capsys.readouterr().out) == told


def test_a_plan_tells_of_the_steps_before_compression(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text('chip = "h100"\nnodes = 2\ngpus_per_node = 2\nnic = 0.1\n')
    asked = ["plan", "--model", "gpt2", "--cluster", str(slow), "--seq-len", "1024", "--global-batch", "16", "--json"]
    asked += ["--tokens", "1e9", "--price", "2"]
    found = {}
    for kind in ("none", "int8", "topk:0.01"):
        assert main([*asked, "--strategy", f"dp=4 compress={kind}"]) == 0
        found[kind] = json.loads(capsys.readouterr().out)
    shown = {kind: one["candidates"][0] for kind, one in found.items()}
    whole, less = (shown[kind]["step_time_s"] for kind in ("none", "topk:0.01"))
    assert less < 0.5 * whole
    told = f"topk begins after 80% of a run (comm.compress_after=auto), whose steps take {whole:.3g} s before, "
    assert any(f"{told}{0.8 * whole + 0.2 * less:.3g} s on average" in line for line in found["topk:0.01"]["why"])
    assert not any("begins after" in line for line in (*found["none"]["why"], *found["int8"]["why"]))
    # All tokens are those of whole steps as well.
    steps = 1e9 / (16 * 1024)
    for kind, mean in (
        ("none", whole),
        ("topk:0.01", 0.8 * whole + 0.2 * less),
        ("int8", shown["int8"]["step_time_s"]),
    ):
        days = steps * mean / 86_400
        assert shown[kind]["days"] == pytest.approx(days, rel=1e-2)
        assert shown[kind]["cost"] == pytest.approx(days * 24 * 2 * 4, rel=1e-2)


def test_known_sizes() -> None:
    # By hand: 64 MiB of gradients; a rank of two sends all of them once in a ring, of four 3/2 of them.
    assert ring(1 << 24, 2, 4) == 64 << 20
    assert ring(1 << 24, 4, 4) == 96 << 20
    shares = {
        kind: [round(Compression.parse(kind).sent(MATRIX, ranks) / ring(1 << 24, ranks, 4), 4) for ranks in (2, 4)]
        for kind in ("fp16", "int8", "powersgd:4", "topk:0.01")
    }
    assert shares["fp16"] == [0.5, 0.5]
    assert shares["int8"] == [0.2539, 0.2539]
    assert shares["powersgd:4"] == [0.002, 0.002]
    assert shares["topk:0.01"] == [0.02, 0.04]


def test_one_rank_sends_nothing() -> None:
    assert all(Compression.parse(kind).sent(MATRIX, 1) == 0 for kind in ("none", "int8", "topk:0.01", "powersgd:4"))


def test_vectors_and_small_matrices_go_whole() -> None:
    how = Compression.parse("powersgd:8")
    assert how.factored((4096,)) is None
    assert how.factored((4096, 8)) is None
    assert how.factored((20, 20)) is None
    assert how.factored((64, 8, 8)) == (64, 64)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40_000),
    st.floats(0.0005, 0.9),
    st.integers(0, 1 << 30),
    st.sampled_from(["normal", "ties", "zeros"]),
)
def test_the_largest_are_the_largest(count: int, share: float, seed: int, kind: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    row = torch.randn(count, generator=draw) ** 3
    row = row.round() if kind == "ties" else torch.zeros(count) if kind == "zeros" else row
    wanted = max(1, int(count * share))
    places = largest(row, wanted)
    assert len(places) == len(set(places.tolist())) == wanted
    found, expected = row[places].abs().sort().values, row.abs().topk(wanted, sorted=True).values.flip(0)
    assert torch.equal(found, expected)


def test_what_is_no_number_is_among_the_largest() -> None:
    row = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    row[[7, 70_000]] = torch.tensor([torch.nan, -torch.inf])
    assert {7, 70_000} <= set(largest(row, 500).tolist())


def test_buckets_follow_from_latency_and_bandwidth() -> None:
    slow, fast = Line(2e-3, 25e6), Line(30e-6, 100e9)
    assert best_bucket(40 << 20, slow) == pytest.approx((2e-3 * 25e6 * (40 << 20)) ** 0.5)
    assert best_bucket(4 << 30, fast) > 100 << 20
    assert best_bucket(40 << 20, Line(1e-9, 1e6)) == LEAST
    assert best_bucket(100, slow) == 100
    assert best_bucket(40 << 20, Line(1e-3, float("inf"))) == 40 << 20


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("unsent.w", (2, 6, 4), "int64", "is int64"),
        ("unsent.w", (2, 6, 5), "float32", "fits no parameter"),
        ("unsent.other", (2, 6, 4), "float32", "fits no parameter"),
        ("basis.w", (5, 2), "float32", "fits no parameter"),
        ("basis.v", (6, 2), "float32", "fits no parameter"),
    ],
)
def test_crafted_memories_are_refused(name: str, shape: tuple[int, ...], dtype: str, said: str) -> None:
    shapes = {"w": (6, 4), "v": (6,)}
    good = {
        "unsent.w": TensorEntry(shape=(3, 6, 4), dtype="float32", pieces=()),
        "basis.w": TensorEntry(shape=(4, 2), dtype="float32", pieces=()),
    }
    manifest = Manifest(step=1, position=0, strategy="dp=2", model=preset("tiny"), tensors=good)
    check_unsent(manifest, shapes)
    crafted = good | {name: TensorEntry(shape=shape, dtype=dtype, pieces=())}
    with pytest.raises(CheckpointError, match=said):
        check_unsent(manifest.model_copy(update={"tensors": crafted}), shapes)
