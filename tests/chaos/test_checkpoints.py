"""Plugs that are pulled during a save, disks that fill up, checkpoints that are damaged: nothing but steps is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import read_manifest, step_name, write_manifest
from meshwright.checkpoint.place import LocalPlace
from meshwright.errors import ExitCode
from tests.chaos.runs import (
    EVERY,
    STEPS,
    assert_near_run,
    assert_same_run,
    checkpoints,
    events,
    losses,
    print_cost,
    report,
    start,
)

PULLS = {
    "staging": "rank=1,step=10,phase=stage,kind=sigkill",
    "a piece of many": "rank=1,step=10,phase=write,kind=sigkill",
    "before the manifest": "rank=0,step=10,phase=commit,kind=sigkill",
    "between manifest and rename": "rank=0,step=10,phase=rename,kind=sigkill",
    "just after the rename": "rank=0,step=10,phase=committed,kind=sigkill",
    "before old ones go": "rank=0,step=10,phase=retention,kind=sigkill",
}


@pytest.mark.parametrize("place", PULLS)
def test_plug_pulled_during_a_save_leaves_the_old_checkpoint_or_the_new(
    place: str, settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    background = list(PULLS).index(place) % 2
    training = start(
        tmp_path, [*settings], f"checkpoint.background={'true' if background else 'false'}", fault=PULLS[place]
    )
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(training.folder, undisturbed)
    (resumed,) = events(training.folder, "resumed")
    assert resumed["step"] == (10 if place in ("just after the rename", "before old ones go") else 5)
    for step in checkpoints(training.folder):
        assert find_damage(LocalPlace(training.folder / "checkpoints" / step_name(step))) == []
    assert not list((training.folder / "checkpoints").glob(".*"))
    report(f"kill -9, {place}", training.folder)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow_chaos)])
def test_plug_pulled_after_any_number_of_pieces_leaves_the_old_checkpoint(
    rank: int, settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    tensors = read_manifest(undisturbed / "checkpoints" / step_name(STEPS)).tensors.values()
    written = [piece for one in tensors for piece in one.pieces if piece.file.endswith(f"-{rank:05d}.safetensors")]
    # One save after the other is cut off, each after more of its pieces. Copies share the pieces in another way once
    # their state was restored, so a rank may have a few less than in a run that went through.
    passed = [1, len(written) // 3, len(written) * 2 // 3, len(written) * 3 // 4]
    assert passed == sorted(set(passed))
    steps = range(EVERY, STEPS + 1, EVERY)
    faults = [
        f"rank={rank},step={step},phase=write,after={count},kind=sigkill,generation={generation}"
        for generation, (step, count) in enumerate(zip(steps, passed, strict=True))
    ]
    training = start(tmp_path, settings, "checkpoint.keep=10", fault=";".join(faults))
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert_same_run(training.folder, undisturbed)
    assert [event["step"] for event in events(training.folder, "failed")] == list(steps)
    assert [event["step"] for event in events(training.folder, "resumed")] == [step - EVERY for step in steps][1:]
    assert [event["steps_lost"] for event in events(training.folder, "restarted")] == [EVERY] * len(steps)
    assert checkpoints(training.folder) == list(steps)
    for step in steps:
        assert find_damage(LocalPlace(training.folder / "checkpoints" / step_name(step))) == []
    assert not list((training.folder / "checkpoints").glob(".*"))
    report(f"6: kill -9 of rank {rank} after {passed} of {len(written)} pieces", training.folder)


def test_full_disk_costs_a_checkpoint_and_the_next_one_is_saved_when_there_is_room(
    settings: list[str], tmp_path: Path, small_disk: Path, undisturbed: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(7 * 2**20))
    slow = "rank=0,step=8,phase=forward,kind=sleep:2"
    training = start(tmp_path, settings, f"checkpoint.dir={small_disk}/c", fault=slow)
    training.wait_for_event("checkpoint_failed")
    filler.unlink()
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    (failed,) = events(training.folder, "checkpoint_failed")
    assert failed["step"] == 5
    assert f"bytes in {small_disk}/c" in failed["error"]
    assert "missing)" in failed["error"]
    assert "training goes on without it" in ended.err
    saved = [event["step"] for event in events(training.folder, "checkpoint")]
    assert saved[-1] == 20
    assert losses(training.folder) == losses(undisturbed)
    print_cost("a full disk", None, None, 0, "a checkpoint less; training went on")


@pytest.fixture(scope="module")
def crashed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was cut off at step 17 with checkpoints of the steps 10 and 15."""
    folder = tmp_path_factory.mktemp("crashed")
    fault = "rank=0,step=17,phase=forward,kind=sigkill"
    training = start(folder, settings, "elastic.max_restarts=0", fault=fault)
    assert training.wait().code not in (0, 2)
    assert checkpoints(training.folder) == [10, 15]
    return training.folder


def flip(folder: Path) -> None:
    path = folder / "optimizer-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def foreign(folder: Path) -> None:
    """The manifest of another run."""
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_bytes(write_manifest(manifest.model_copy(update={"run": "0" * 32})))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "optimizer-00001.safetensors is damaged"),
    "a truncated file": (
        lambda folder: os.truncate(folder / "model-00000.safetensors", 3000),
        "model-00000.safetensors is damaged",
    ),
    "a missing file": (
        lambda folder: (folder / "model-00001.safetensors").unlink(),
        "model-00001.safetensors is missing",
    ),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "manifest.json is damaged"),
    "the manifest of another run": (foreign, "another run"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_is_passed_over_aloud(
    kind: str, settings: list[str], crashed: Path, tmp_path: Path, undisturbed: Path
) -> None:
    shutil.copytree(crashed, tmp_path / "run")
    damage, words = DAMAGES[kind]
    damage(tmp_path / "run/checkpoints/step-000015")
    training = start(tmp_path, settings)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert words in ended.err
    assert "going back to the checkpoint of step 10" in ended.err
    (told,) = events(training.folder, "checkpoint_fallback")
    assert told["step"] == 10
    assert len(list((training.folder / "checkpoints").glob("step-000015.damaged-*"))) == 1
    found = told["time"] - training.started
    print_cost(f"{kind} in the newest checkpoint", found, None, 16 - 10, "detected with the start of the process")
    assert_same_run(training.folder, undisturbed)


def test_run_without_a_whole_checkpoint_ends_and_never_starts_from_nothing(
    settings: list[str], crashed: Path, tmp_path: Path
) -> None:
    shutil.copytree(crashed, tmp_path / "run")
    for step in (10, 15):
        flip(tmp_path / "run/checkpoints" / step_name(step))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    ended = start(tmp_path, settings).wait()
    assert ended.code == ExitCode.DAMAGED, ended.err
    for step in (10, 15):
        assert f"{step_name(step)}/optimizer-00001.safetensors is damaged" in ended.err
    assert "does not start from nothing" in ended.err
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert not events(tmp_path / "run", "restarted")


def test_bound_of_passing_over_is_kept(settings: list[str], crashed: Path, tmp_path: Path) -> None:
    shutil.copytree(crashed, tmp_path / "run")
    flip(tmp_path / "run/checkpoints/step-000015")
    ended = start(tmp_path, settings, "checkpoint.fallback=0").wait()
    assert ended.code == ExitCode.DAMAGED, ended.err
    assert "raise checkpoint.fallback" in ended.err


def test_other_layouts_go_on_with_the_same_run(settings: list[str], tmp_path: Path) -> None:
    wide = [*settings, "train.precision=float64", "observe.ledger=true"]
    whole = start(tmp_path, wide, name="whole", nproc=1)
    assert whole.wait().code == ExitCode.DONE
    chain = ["dp=4", "tp=2 dp=2", "pp=2 dp=2", "zero=3 dp=4"]
    for number, strategy in enumerate(chain):
        # Stopped, as a scheduler would, in the middle of each part but the last.
        fault = f"rank=0,step={5 * number + 3},phase=forward,kind=sigterm,generation=any"
        last = strategy == chain[-1]
        training = start(tmp_path, wide, f"parallel.strategy={strategy}", nproc=4, fault="" if last else fault)
        ended = training.wait()
        assert ended.code == (ExitCode.DONE if last else ExitCode.PREEMPTED), ended.err
    assert [event["strategy"] for event in events(training.folder, "resumed")] == [
        "dp=2 tp=2",
        "dp=2 pp=2",
        "dp=4 zero=3",
    ]
    assert_near_run(training.folder, whole.folder)
