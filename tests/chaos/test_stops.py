"""Runs that are asked to stop save at a step boundary, end with their own exit code and go on as if nothing was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from meshwright.errors import ExitCode
from tests.chaos.runs import (
    STEPS,
    assert_same_run,
    checkpoints,
    fault_time,
    last_step,
    print_cost,
    start,
    wait_until_gone,
)

GRACE_S = 20
"""What schedulers leave a job that they stop, at the least; these runs have small steps and small saves."""


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        pytest.param("start", 0, marks=pytest.mark.slow_chaos),
        ("restore", 0),
        ("forward", 7),
        pytest.param("evaluate", STEPS // 2, marks=pytest.mark.slow_chaos),
        pytest.param("hooks", 5, marks=pytest.mark.slow_chaos),
    ],
)
def test_signal_to_one_rank_in_any_phase_saves_and_the_same_command_goes_on(
    phase: str, step: int, settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    evaluations = f"train.eval_every={STEPS // 2}"
    training = start(tmp_path, settings, evaluations, fault=f"rank=1,step={step},phase={phase},kind=sigterm")
    ended = training.wait()
    ended_at = time.time()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    assert "Traceback" not in ended.err
    # What is recorded is saved: nothing has to be done again.
    assert last_step(training.folder) == (checkpoints(training.folder) or [0])[-1]
    assert last_step(training.folder) in (step, step + 1)
    seconds = ended_at - fault_time(training.folder, "sigterm")
    assert seconds < GRACE_S
    print_cost(f"SIGTERM to one rank in {phase}", None, None, 0, f"saved and ended in {seconds:.2f} s")
    again = start(tmp_path, settings)
    ended = again.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(again.folder, undisturbed)


SLOW = pytest.mark.slow_chaos


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW), pytest.param(signal.SIGHUP, marks=SLOW)]
)
def test_signal_to_the_whole_process_group_saves(number: signal.Signals, settings: list[str], tmp_path: Path) -> None:
    # Schedulers signal the group: whatever is in it gets the signal at the same moment.
    training = start(tmp_path, settings, "train.steps=100000", session=True)
    training.wait_for_step(7)
    began = time.monotonic()
    os.killpg(training.process.pid, number)
    ended = training.wait()
    seconds = time.monotonic() - began
    assert ended.code == ExitCode.PREEMPTED, ended.err
    assert seconds < GRACE_S
    print_cost(number.name, None, None, 0, f"saved and ended in {seconds:.2f} s")
    assert checkpoints(training.folder)[-1] == last_step(training.folder)


def test_signal_to_every_process_of_the_run_saves(settings: list[str], tmp_path: Path) -> None:
    # As Slurm and systemd do it: those below a launcher get it from them, and a moment later from the launcher.
    training = start(tmp_path, settings, "train.steps=100000", fault="phase=end,kind=sleep:2")
    training.wait_for_step(7)
    launcher = psutil.Process(training.launcher.pid)
    for process in [launcher, *launcher.children(recursive=True)] * 2:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    ended = training.wait()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    assert checkpoints(training.folder)[-1] == last_step(training.folder)


def test_second_signal_during_the_save_ends_at_once_and_damages_nothing(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    training = start(tmp_path, settings, fault="phase=end,kind=sleep:30")
    training.wait_for_step(7)
    training.launcher.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    ranks = list(training.ranks().values())
    training.launcher.send_signal(signal.SIGTERM)
    ended = training.wait(20)
    assert ended.code == 128 + signal.SIGTERM
    gone = wait_until_gone(ranks, 5)
    note = f"ranks gone {gone:.2f} s after the launcher; the checkpoint in hand is not there"
    print_cost("a second SIGTERM during the save", None, None, last_step(training.folder) - 5, note)
    again = start(tmp_path, settings)
    ended = again.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(again.folder, undisturbed)
