"""What ranks record of steps on a GPU: by its own clock, broken down by the profiler's trace of its kernels."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from meshwright.verify.pool import RankPool
from tests.conftest import CommandLine
from tests.parity.test_recorder import PROFILED, SLOW_S, SLOW_STEP, STEPS, STRATEGIES, Recorded, assert_bytes, record

LARGER = ["model.spec.hidden_size=512", "model.spec.intermediate_size=1536", "model.spec.num_attention_heads=8"]
"""Steps of kernels that take longer than their launches."""


@pytest.fixture(scope="module")
def recorded(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """A run of each strategy, one step of which is slow on one rank; and one of a single rank."""
    root = tmp_path_factory.mktemp("recorded")
    runs = {"dp=1": 1, **STRATEGIES}
    return {
        strategy: record(pool, corpus, root / str(number), strategy, ranks, "train.compile=off")
        for number, (strategy, ranks) in enumerate(runs.items())
    }


@pytest.mark.parametrize("strategy", ["dp=1", *STRATEGIES])
def test_every_step_of_every_rank_is_there_and_all_of_its_time(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    for rank, lines in run.lines.items():
        assert lines[0]["device"].startswith("cuda")
        steps = run.steps(rank)
        assert list(steps) == list(range(1, STEPS + 1))
        for line in steps.values():
            assert sum(line["parts"].values()) == pytest.approx(line["seconds"], abs=1e-5)
            assert line["parts"].get("unattributed", 0.0) < 0.05 * line["seconds"]
            memory = line["memory"]
            assert 0 < memory["allocated"] <= memory["peak"] <= memory["held"]
            assert memory["allocated"] <= memory["reserved"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_host_that_launches_late_shows_in_the_phase_where_it_was_late(
    strategy: str, recorded: dict[str, Recorded]
) -> None:
    own = {step: line["parts"]["backward"] for step, line in recorded[strategy].steps(1).items()}
    assert own[SLOW_STEP] > 0.9 * SLOW_S
    assert statistics.median(own.values()) < SLOW_S / 2


@pytest.mark.parametrize("strategy", ["dp=1", *STRATEGIES])
def test_profiled_steps_are_broken_down(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    for rank in run.lines:
        steps = run.steps(rank)
        assert tuple(step for step, line in steps.items() if line.get("profiled")) == PROFILED
        for step in PROFILED:
            line = steps[step]
            whole = line["compute"] + line["communication"]["exposed"] + line["bubble"] + line["idle"]
            assert 0.5 * line["seconds"] - line["parts"]["hooks"] < whole < 1.01 * line["seconds"]
            assert line["compute"] > 0
        for line in run.spans[rank]:
            assert {"forward", "backward", "optimizer"} <= {kind for _, kind, _, _ in line["spans"]}


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if "pp" not in one])
def test_bytes_of_collectives_are_those_of_the_closed_form(strategy: str, recorded: dict[str, Recorded]) -> None:
    assert_bytes(recorded[strategy])


def test_recording_takes_less_than_half_a_percent_of_steps_of_some_length(
    pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    more = [*LARGER, "train.compile=off", "train.steps=40", "observe.profile_every=20", "checkpoint.every=0"]
    run = record(pool, corpus, tmp_path / "run", "dp=1", 1, *more)
    assert run.of(0, "recorder")[-1]["share"] < 0.005


def test_a_run_shows_its_use_of_the_chip_and_gives_a_timeline(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    settings = ["train.steps=12", "observe.profile_every=4", "observe.tensorboard=false", "run.device=cuda"]
    done = meshwright("train", *tiny_run, *settings, "run.dir=run", "parallel.strategy=dp=1")
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["mfu"] < 1 for line in metrics if "loss" in line)
    traced = meshwright("watch", "run", "--trace", "trace.json")
    assert traced.returncode == 0, traced.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer"} <= {event.get("cat") for event in events}
    assert (tmp_path / "run/report.html").exists()
