"""Signals to a training and to its ranks: it saves, stops, pauses, and leaves no process behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from meshwright.errors import ExitCode
from tests.chaos.runs import ranks_below
from tests.e2e.trainings import metrics, metrics_so_far, start, wait_for_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_interrupt_saves_once_and_the_same_command_goes_on(tiny_run: list[str], tmp_path: Path, ranks: str) -> None:
    options = [*tiny_run, "--nproc", ranks, "run.dir=a", "train.steps=100000"]
    process = start(tmp_path, *options)
    wait_for_step(tmp_path / "a", 3, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert errors.count("stopping after this step") == 1
    assert "Traceback" not in errors
    (checkpoint,) = (tmp_path / "a/checkpoints").iterdir()
    step = len(metrics(tmp_path / "a"))
    assert checkpoint.name == f"step-{step:06d}"
    assert f"stopped at step {step} (SIGINT)" in output
    more = start(tmp_path, *options[:-1], f"train.steps={step + 2}")
    assert more.wait(60) == 0
    assert [line["step"] for line in metrics(tmp_path / "a")] == list(range(1, step + 3))


def test_signal_to_one_rank_stops_all_of_them_at_the_same_step(tiny_run: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *tiny_run, "--nproc", "2", "run.dir=a", "train.steps=100000")
    wait_for_step(tmp_path / "a", 2, process)
    ranks_below(process.pid)[1].send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert f"stopped at step {len(metrics(tmp_path / 'a'))} (another rank was asked to stop)" in output


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_second_interrupt_ends_at_once_and_leaves_no_process(tiny_run: list[str], tmp_path: Path, ranks: str) -> None:
    # A step that takes minutes, so that the first interrupt is still waiting for its end.
    options = [*tiny_run, "--nproc", ranks, "run.dir=a", "train.global_batch=8192"]
    process = start(tmp_path, *options)
    deadline = time.monotonic() + 60
    while not (tmp_path / "a/metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The file is the first rank's; another may still be on its way to its first step.
    time.sleep(3)
    ranks_running = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130
    psutil.wait_procs(ranks_running, timeout=5)
    assert not any(child.is_running() for child in ranks_running)


def test_ranks_do_not_outlive_a_killed_parent(tiny_run: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *tiny_run, "--nproc", "2", "run.dir=a", "train.steps=100000")
    wait_for_step(tmp_path / "a", 1, process)
    ranks = list(ranks_below(process.pid).values())
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_pause_of_the_parent_pauses_the_ranks(tiny_run: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *tiny_run, "--nproc", "2", "run.dir=a", "train.steps=100000")
    wait_for_step(tmp_path / "a", 2, process)
    process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    paused = len(metrics_so_far(tmp_path / "a"))
    time.sleep(1)
    assert len(metrics_so_far(tmp_path / "a")) == paused
    process.send_signal(signal.SIGCONT)
    wait_for_step(tmp_path / "a", paused + 2, process)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert list((tmp_path / "a/checkpoints").glob("step-*"))


def test_one_signal_after_an_early_stop_does_not_cost_the_save(tiny_run: list[str], tmp_path: Path) -> None:
    # Saving the demo model takes long enough to be hit by a signal once the run has stopped by itself.
    options = [*tiny_run, "model.preset=demo", "train.lr=1e-12", "train.eval_every=1", "train.early_stop=1"]
    process = start(tmp_path, *options, "model.spec.num_hidden_layers=8", "run.dir=a", "train.steps=50")
    wait_for_step(tmp_path / "a", 2, process)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "a").glob("checkpoints/.step-*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert list((tmp_path / "a/checkpoints").glob("step-*"))
