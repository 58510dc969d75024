"""Storage that is full, read-only or slow: training goes on where it can, and says what is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import step_name
from meshwright.checkpoint.place import LocalPlace
from meshwright.errors import ExitCode
from tests.chaos.runs import (
    EVERY,
    STEPS,
    assert_same_run,
    checkpoints,
    events,
    losses,
    metrics,
    print_cost,
    start,
    weights,
)


def test_events_that_cannot_be_written_end_no_training(
    settings: list[str], tmp_path: Path, small_disk: Path, undisturbed: Path
) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").symlink_to(small_disk / "events.jsonl")
    # The launcher has something to write, too.
    training = start(tmp_path, settings, fault="rank=1,step=7,phase=forward,kind=sigkill")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert "Traceback" not in ended.err
    # Once by the first rank of each of the two generations, once by the launcher.
    assert ended.err.count("events.jsonl cannot be written: No space left on device") == 3
    assert events(training.folder) == []
    assert_same_run(training.folder, undisturbed)
    print_cost("21: a full disk under events.jsonl", None, None, None, "told once a process; training went on")


@pytest.mark.parametrize("room", [4096, pytest.param(0, marks=pytest.mark.slow_chaos)])
def test_curves_that_cannot_be_written_end_no_training(
    room: int, settings: list[str], tmp_path: Path, small_disk: Path
) -> None:
    assert start(tmp_path, settings, "train.steps=2").wait().code == ExitCode.DONE
    # Room for the first steps' curves, or for nothing at all.
    (small_disk / "filler").write_bytes(bytes(2**20 - room))
    (tmp_path / "run/tensorboard").symlink_to(small_disk)
    training = start(tmp_path, settings, "observe.tensorboard=true", "train.steps=60")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("/tensorboard cannot be written: No space left on device") == 1
    assert [step for step, _, _ in losses(training.folder)] == list(range(1, 61))
    print_cost("21: a full disk under the curves", None, None, 0, "told once; training went on")


@pytest.mark.slow_chaos
@pytest.mark.parametrize("background", ["true", "false"])
def test_storage_that_is_read_only_for_a_while_costs_a_checkpoint(
    background: str, settings: list[str], tmp_path: Path, small_disk: Path, undisturbed: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    # Time to break it before the second checkpoint, and to mend it before the third.
    slow = "rank=0,step=8,phase=forward,kind=sleep:3;rank=0,step=13,phase=forward,kind=sleep:3"
    options = [f"checkpoint.background={background}", f"checkpoint.dir={small_disk}/c"]
    training = start(tmp_path, settings, *options, fault=slow)
    training.wait_for_step(7)
    training.wait_for_event("checkpoint")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        training.wait_for_event("checkpoint_failed")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert "Traceback" not in ended.err
    (failed,) = events(training.folder, "checkpoint_failed")
    assert failed["step"] == 2 * EVERY
    assert "Read-only file system" in failed["error"]
    assert str(small_disk) in failed["error"]
    assert "training goes on without it" in ended.err
    assert [event["step"] for event in events(training.folder, "checkpoint")] == [EVERY, 3 * EVERY, STEPS]
    held = sorted(path.name for path in (small_disk / "c").glob("step-*"))
    assert held == [step_name(3 * EVERY), step_name(STEPS)]
    for name in held:
        assert find_damage(LocalPlace(small_disk / "c" / name)) == []
    assert losses(training.folder) == losses(undisturbed)
    note = "a checkpoint less; training went on"
    print_cost(f"22: storage read-only, background={background}", None, None, 0, note)


@pytest.mark.slow_chaos
def test_storage_slower_than_the_saves_costs_checkpoints_and_no_time(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    # A write that takes three seconds; the steps until the next save take a fraction of that.
    slow = f"rank=1,step={EVERY},phase=write,kind=sleep:3"
    training = start(tmp_path, settings, "checkpoint.background=true", "checkpoint.wait_s=0", fault=slow)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    skipped = events(training.folder, "checkpoint_skipped")
    assert skipped
    assert skipped[0]["step"] == 2 * EVERY
    assert "its storage is slow" in skipped[0]["error"]
    assert f"the checkpoint of step {2 * EVERY} is left out" in ended.err
    # What is staged and what is durable are told apart while the write lasts.
    lag = max(line["staged_step"] - line.get("durable_step", 0) for line in metrics(training.folder)[EVERY:])
    assert lag >= EVERY
    longest = max(line["step_s"] for line in metrics(training.folder)[EVERY : 2 * EVERY])
    assert longest < 2, "no step waits for the storage"
    assert checkpoints(training.folder)[-1] == STEPS
    assert losses(training.folder) == losses(undisturbed)
    assert weights(training.folder) == weights(undisturbed)
    print_cost("23: storage slower than the saves", None, None, 0, f"{len(skipped)} checkpoints left out")
