"""Ranks that are killed: the run restarts from its newest checkpoint and becomes the run that it would have been."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from tests.chaos.runs import EVERY, assert_same_run, events, last_step, print_cost, report, start, wait_until_gone

KILLS = {
    "one rank in the forward pass": ("rank=1,step=7,phase=forward,kind=sigkill", {1}),
    "the first rank in the backward pass": ("rank=0,step=7,phase=backward,kind=sigkill", {0}),
    "all ranks at once": ("step=7,phase=reduce,kind=sigkill", {0, 1}),
}


@pytest.mark.parametrize("case", KILLS)
def test_killed_ranks_are_restarted_and_nothing_is_lost(
    case: str, settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    fault, guilty = KILLS[case]
    training = start(tmp_path, settings, fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(training.folder, undisturbed)
    (failed,) = events(training.folder, "failed")
    assert failed["rank"] in guilty
    assert (failed["step"], failed["cause"], failed["generation"]) == (7, "ended by SIGKILL", 0)
    assert f"rank {failed['rank']} of 2 was ended by SIGKILL" in ended.err
    (restarted,) = events(training.folder, "restarted")
    assert (restarted["step"], restarted["generation"], restarted["steps_lost"]) == (EVERY, 1, 1)
    report(f"kill -9 of {case}", training.folder)
    assert failed["detect_s"] + restarted["restart_s"] < 10


def test_rank_that_is_killed_before_its_first_step_is_restarted(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    training = start(tmp_path, settings, fault="rank=1,step=0,phase=restore,kind=sigkill")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(training.folder, undisturbed)
    (failed,) = events(training.folder, "failed")
    assert (failed["rank"], failed["step"], failed["phase"]) == (1, 0, "restore")
    report("kill -9 before the first step", training.folder)


def test_ranks_die_with_their_launcher_and_the_same_command_goes_on_at_once(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    training = start(tmp_path, settings, "train.steps=20", fault="step=12,phase=forward,kind=sleep:0.2")
    training.wait_for_step(12)
    ranks = list(training.ranks().values())
    assert len(ranks) == 2
    killed, done = time.time(), last_step(training.folder)
    training.launcher.kill()
    again = start(tmp_path, settings)
    gone = wait_until_gone(ranks, timeout=10)
    training.end()
    ended = again.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(again.folder, undisturbed)
    (resumed,) = events(again.folder, "resumed")
    note = "detected: all ranks gone; restarted: by the next command, with the start of its process"
    print_cost("kill -9 of the launcher", gone, resumed["time"] - killed, max(0, done - resumed["step"]), note)
