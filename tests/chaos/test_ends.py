"""Runs that starting again does not help: they end with their own exit code and the cause first."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.lock import Fence, read_holder, take_lock
from tests.chaos.runs import assert_same_run, checkpoints, events, print_cost, report, start


def test_step_that_always_fails_ends_without_burning_restarts(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, fault="rank=1,step=7,phase=backward,generation=any,kind=raise")
    ended = training.wait()
    assert ended.code == ExitCode.NO_PROGRESS
    assert "step 7 failed 3 times in a row" in ended.err
    assert "elastic.same_step_failures=3" in ended.err
    failed = events(training.folder, "failed")
    assert [(line["rank"], line["step"], line["phase"], line["generation"]) for line in failed] == [
        (1, 7, "backward", generation) for generation in range(3)
    ]
    report("a step that always fails", training.folder)


def test_first_traceback_is_that_of_the_guilty_rank(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=2,step=3,phase=forward,generation=any,kind=raise"
    training = start(tmp_path, settings, "elastic.max_restarts=1", nproc=4, fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.FAILED
    assert "elastic.max_restarts=1" in ended.err
    assert "InjectedError: injected fault raise" in ended.err
    assert "Connection closed" not in ended.err
    assert {line["rank"] for line in events(training.folder, "failed")} == {2}
    report("a rank that raises", training.folder)


def test_mistake_of_the_user_found_by_a_rank_is_not_tried_again(settings: list[str], tmp_path: Path) -> None:
    assert start(tmp_path, settings, "train.steps=2").wait().code == ExitCode.DONE
    other = ["model.spec.num_hidden_layers=3" if "num_hidden_layers" in word else word for word in settings]
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace("num_hidden_layers = 2", "num_hidden_layers = 3"))
    ended = start(tmp_path, other).wait()
    assert ended.code == ExitCode.BAD_INPUT, ended.err
    assert not events(tmp_path / "run", "restarted")
    assert "another model shape" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.alone
def test_second_training_in_a_folder_is_refused_with_the_name_of_the_first(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, "train.steps=100000")
    training.wait_for_step(2)
    began = time.monotonic()
    second = start(tmp_path, settings, "train.steps=100000").wait()
    assert second.code == ExitCode.LOCKED
    holder = read_holder(training.folder / ".lock")
    assert holder is not None
    assert f"process {training.process.pid} on {holder.host} (generation 0)" in second.err
    refused = time.monotonic() - began
    assert refused < 15, "a launcher that is seen to live is not waited for"
    print_cost("a second training in the folder", refused, None, 0, "refused; with the start of its process")
    training.launcher.send_signal(signal.SIGTERM)
    assert training.wait().code == ExitCode.PREEMPTED


def test_rank_of_a_generation_that_was_replaced_writes_no_more(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, "train.steps=100000", "checkpoint.every=0")
    training.wait_for_step(3)
    lock = training.folder / ".lock"
    holder = read_holder(lock)
    assert holder is not None
    # What a later generation on another machine does to the lock.
    lock.with_name(".new").write_text(
        lock.read_text().replace(holder.launch, "other").replace(holder.host, "elsewhere")
    )
    lock.with_name(".new").rename(lock)
    began = time.monotonic()
    ended = training.wait(30)
    print_cost("a generation that was replaced", time.monotonic() - began, None, None, "it writes no more and ends")
    assert ended.code == ExitCode.LOCKED
    assert "belongs to process" in ended.err
    assert "on elsewhere" in ended.err
    assert checkpoints(training.folder) == []


def test_lock_is_waited_for_when_the_launcher_is_gone(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = take_lock(folder / ".lock", Fence("old"))
    lock.write(Fence("old", generation=3, pid=2**22 - 1))
    training = start(tmp_path, settings)
    assert training.process.stderr is not None
    assert "waiting for the end of process 4194303" in training.process.stderr.readline()
    time.sleep(1)
    assert training.process.poll() is None
    assert not (folder / "config.toml").exists()
    lock.close()
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(folder, undisturbed)
