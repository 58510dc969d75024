"""Whole runs on real ranks: data, loop, evaluation and checkpoints give what one process gives, in float64."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.reader import load_whole
from meshwright.config import RunConfig, load_config
from meshwright.data.prepare import prepare
from meshwright.errors import UserError
from meshwright.launch.local import RankError, run_ranks
from meshwright.models.hf import save_hf
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.trainer import train
from meshwright.training.loop import TrainingLoop

CASES = {
    "dense": [],
    "accumulated": ["train.micro_batch=1"],
    "dropout": ["model.spec.dropout=0.1"],
    "tied": ["model.spec.tie_word_embeddings=true"],
    "gpt2-like": [
        "model.spec.norm=layernorm",
        "model.spec.positions=learned",
        "model.spec.activation=gelu_tanh",
        "model.spec.bias=['q','k','v','o','up','down']",
    ],
    "experts": ["model.preset=tiny-moe", "model.spec.experts.router_bias_update_rate=0.01"],
    "ramp": ["train.batch_schedule=4..12 over 4"],
}

Run = Callable[..., Path]


@pytest.fixture
def run(tiny_run: list[str], tmp_path: Path) -> Run:
    """Trains in float64 and gives the run folder."""

    def start(name: str, ranks: int, *overrides: str) -> Path:
        settings = [*tiny_run, "train.precision=float64", "observe.tensorboard=false", "train.eval_every=3"]
        # One rank is this process, in which a profiler would leave a thread behind.
        settings.append("observe.profile_every=0")
        folder = tmp_path / name
        train(load_config(None, [*settings, *overrides, f"run.dir={folder}"]), ranks)
        return folder

    return start


@pytest.fixture(scope="module")
def on_one() -> dict[tuple[str, ...], Path]:
    """Runs on one process that several strategies are compared with, by their settings."""
    return {}


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path) -> None:
    assert [line["step"] for line in lines(one)] == [line["step"] for line in lines(other)]
    for expected, found in zip(lines(one), lines(other), strict=True):
        # A part of a run that ends early evaluates at its end, where the whole run does not.
        for name in {"loss", "grad_norm", "lr", "tokens", "eval_loss"} & expected.keys() & found.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-9), f"{name} of step {found['step']}"
    assert "eval_loss" in lines(one)[-1].keys() & lines(other)[-1].keys()
    (final,) = {path.name for path in (one / "checkpoints").iterdir()} & {
        p.name for p in (other / "checkpoints").iterdir()
    }
    expected, found = (load_whole(run / "checkpoints" / final, "model.") for run in (one, other))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert weight.dtype == torch.float64
        bound = 1e-9 * max(1.0, float(weight.abs().max()))
        assert float((weight - found[name]).abs().max()) <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "strategy",
    [
        "dp=2",
        "dp=4 zero=3 shard=2",
        "dp=2 zero=1 tp=2",
        "dp=1 tp=4 recompute=selective",
        "dp=2 zero=2 pp=2",
        "dp=1 pp=2 tp=2 schedule=zero-bubble",
    ],
)
def test_run_on_ranks_gives_what_a_run_on_one_process_gives(
    case: str, strategy: str, run: Run, on_one: dict[tuple[str, ...], Path]
) -> None:
    ranks, samples = Strategy.processes(strategy), int(strategy[3])
    assert ranks is not None
    # A micro-step holds the same samples however many ranks share it: its size on one process is that of all ranks.
    alone = [o if o != "train.micro_batch=1" else f"train.micro_batch={samples}" for o in CASES[case]]
    together = list(CASES[case])
    if "pp=" in strategy:
        # Pipelines cut the batch into micro-steps by themselves; the balancing loss of experts counts by these.
        together, alone = [*together, "train.micro_batch=1"], [*alone, f"train.micro_batch={samples}"]
    # A ramp needs its six steps.
    short = [] if case == "ramp" else ["train.steps=4", "train.eval_every=2"]
    if tuple(alone) not in on_one:
        on_one[tuple(alone)] = run("one", 1, *alone, *short)
    assert_same_run(on_one[tuple(alone)], run("many", ranks, *together, *short, f"parallel.strategy={strategy}"))


def test_two_ranks_give_what_one_process_gives(run: Run) -> None:
    assert_same_run(run("one", 1), run("many", 2))


@pytest.mark.slow
def test_split_sequences_of_several_documents_give_what_one_process_gives(run: Run, tmp_path: Path) -> None:
    for number in range(400):
        (tmp_path / f"{number}.txt").write_text(f"document {number} is short. " * (1 + number % 3))
    prepare([tmp_path], tmp_path / "packed", "bytes", workers=1)
    settings = [f"data.path={tmp_path / 'packed'}", "data.sequence_length=30", "train.steps=3"]
    masked = [*settings, "data.mask_documents=true"]
    one = run("one", 1, *masked)
    assert_same_run(one, run("many", 4, *masked, "parallel.strategy=dp=2 zero=1 cp=2"))
    unmasked = run("unmasked", 1, *settings)
    assert lines(one)[0]["loss"] != lines(unmasked)[0]["loss"]


def test_resuming_inside_a_ramp_under_other_strategies_repeats_and_loses_nothing(run: Run) -> None:
    ramp = ["train.batch_schedule=4..12 over 4", "train.steps=7", "model.spec.dropout=0.1", "train.schedule=constant"]
    whole = run("whole", 1, *ramp)
    run("parts", 2, *ramp, "train.steps=2", "parallel.strategy=zero=3")
    run("parts", 4, *ramp, "train.steps=3", "parallel.strategy=zero=1 replicate=2")
    run("parts", 4, *ramp, "train.steps=4", "parallel.strategy=zero=2 shard=2")
    run("parts", 4, *ramp, "train.steps=5", "parallel.strategy=zero=1 pp=2")
    run("parts", 4, *ramp, "train.steps=6", "parallel.strategy=zero=1 tp=2 offload=optimizer")
    parts = run("parts", 1, *ramp, "train.steps=7")
    assert_same_run(whole, parts)


@pytest.mark.slow
def test_weights_from_hugging_face_are_split_as_they_are_read(run: Run, tiny_run: list[str], tmp_path: Path) -> None:
    spec = preset("tiny").model_copy(update={"num_hidden_layers": 2, "tie_word_embeddings": True})
    save_hf(build(spec, seed=5), tmp_path / "hf")
    tiny_run[:] = [setting for setting in tiny_run if not setting.startswith("model.")]
    from_hf = [f"model.from_hf={tmp_path / 'hf'}"]
    strategies = (("one", 1, "auto"), ("many", 4, "zero=3 tp=2"), ("stages", 4, "zero=2 pp=2"))
    one, *others = (run(name, ranks, *from_hf, f"parallel.strategy={strategy}") for name, ranks, strategy in strategies)
    for other in others:
        assert_same_run(one, other)


def work_of_failing_in_set_up(config: RunConfig, world: World) -> None:
    if world.rank == 1:
        world = replace(world, device=torch.device("nowhere"))
    TrainingLoop(config, world)


def test_rank_that_fails_in_set_up_ends_all_within_seconds_and_speaks_first(
    tiny_run: list[str], tmp_path: Path
) -> None:
    settings = [*tiny_run, f"run.dir={tmp_path / 'run'}", "parallel.strategy=zero=3 tp=2"]
    started = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 4 failed:\nTraceback") as caught:
        run_ranks(partial(work_of_failing_in_set_up, load_config(None, settings)), 4, device="cpu", timeout_s=600)
    assert time.monotonic() - started < 20
    assert "nowhere" in str(caught.value)
    assert "Connection closed" not in str(caught.value)


def work_of_local_ranks_are_told(world: World) -> None:
    if os.environ.get("GLOO_SOCKET_IFNAME") not in ("lo", "lo0"):
        raise UserError(f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')}")


def test_local_ranks_are_told_to_talk_over_loopback() -> None:
    run_ranks(work_of_local_ranks_are_told, 2, device="cpu", timeout_s=60)


def work_of_failing_rank_is_named(world: World) -> None:
    if world.rank == 1:
        raise ZeroDivisionError("planted")
    world.sum(torch.zeros(1))


def test_failing_rank_is_named_with_its_own_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 3 failed") as caught:
        run_ranks(work_of_failing_rank_is_named, 3, device="cpu", timeout_s=60)
    assert "ZeroDivisionError: planted" in str(caught.value)


def work_of_killed_rank_is_named(world: World) -> None:
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    world.sum(torch.zeros(1))


def test_killed_rank_is_named_although_the_others_complain_too() -> None:
    with pytest.raises(RankError, match="rank 2 of 3 was ended by SIGKILL"):
        run_ranks(work_of_killed_rank_is_named, 3, device="cpu", timeout_s=60)


def work_of_own_error_of_a(world: World) -> None:
    if world.rank == 0:
        raise ZeroDivisionError("planted")
    try:
        world.sum(torch.zeros(1))
    except RuntimeError:
        os.abort()


def test_own_error_of_a_rank_is_the_cause_although_another_aborts() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed") as caught:
        run_ranks(work_of_own_error_of_a, 2, device="cpu", timeout_s=60)
    assert "ZeroDivisionError: planted" in str(caught.value)


def work_of_long_error_does_not(world: World) -> None:
    raise ValueError("é" * 100_000)


def test_long_error_does_not_keep_a_rank_from_ending() -> None:
    with pytest.raises(RankError, match="é"):
        run_ranks(work_of_long_error_does_not, 2, device="cpu", timeout_s=60)


def work_of_mistake_found_by_a(world: World) -> None:
    raise UserError("change train.lr")


def test_mistake_found_by_a_rank_is_told_as_a_mistake() -> None:
    with pytest.raises(UserError, match="change train.lr"):
        run_ranks(work_of_mistake_found_by_a, 2, device="cpu", timeout_s=60)
