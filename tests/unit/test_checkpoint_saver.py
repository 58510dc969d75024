"""Saving is all or nothing: crashes and full disks never cost an earlier checkpoint, and old ones go by the rules."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import list_checkpoints, step_name
from meshwright.checkpoint.marks import mark
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import LocalPlace, open_place, own_place
from meshwright.checkpoint.retention import Known, Retention, prune
from meshwright.checkpoint.saver import Saver
from meshwright.errors import CheckpointError
from meshwright.parallel.exchange import Exchange
from tests.unit.checkpoints import Tensors, facts, loaded, save, saved, saver_of


def test_what_is_staged_is_what_is_saved_whatever_training_does_next(tmp_path: Path) -> None:
    writing = threading.Event()
    tensor = torch.arange(1000.0)
    saver = saver_of(tmp_path, at=lambda place, _: writing.wait(10) if place == "write" else None)
    saver.save(facts(1), {"model.x": Held.of(tensor)}, background=True)
    assert saver.busy
    assert saver.staged_step == 1
    assert saver.durable_step == -1
    tensor.zero_()
    writing.set()
    saver.wait()
    assert saver.durable_step == 1
    assert loaded(tmp_path / "step-000001", {"model.x": tensor})["model.x"].equal(torch.arange(1000.0))


def test_small_disk_says_how_much_is_missing_and_keeps_the_old_checkpoint(small_disk: Path, tensors: Tensors) -> None:
    saved(small_disk, 1, tensors)
    error = save(small_disk, 2, {"model.big": torch.zeros(1_000_000)}).error
    assert error is not None
    assert "needs 4,000,000 bytes in" in error
    assert "missing)" in error
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]


def test_disk_that_fills_while_saving_leaves_nothing_that_looks_whole(
    small_disk: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(small_disk, 1, tensors)
    # Another process takes the space between the check and the write.
    monkeypatch.setattr(LocalPlace, "free", lambda _: None)
    error = save(small_disk, 2, {"model.big": torch.zeros(1_000_000)}).error
    assert error is not None
    assert "the rest of model-00000.safetensors needs" in error
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]


PLACES = ["stage", "staged", "write", "commit", "rename", "committed", "retention"]


@pytest.mark.parametrize("place", PLACES)
def test_a_crash_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, tensors: Tensors, place: str
) -> None:
    for step in (1, 2):
        saved(tmp_path, step, tensors)
    child = os.fork()
    if child == 0:
        saver = saver_of(tmp_path, at=lambda found, _: os._exit(7) if found == place else None)
        saver.save(facts(3), {name: Held.of(tensor) for name, tensor in tensors.items()}, background=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    new = PLACES.index(place) > PLACES.index("rename")
    names = ["step-000001", "step-000002"] + ["step-000003"] * new
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    for folder in list_checkpoints(tmp_path):
        loaded(folder, tensors)
    LocalPlace(tmp_path).clear_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_saved_step_is_never_overwritten(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    before = (folder / "model-00000.safetensors").stat().st_mtime_ns
    error = save(tmp_path, 1, {"model.x": torch.zeros(1)}).error
    assert error is not None
    assert "never overwritten" in error
    assert (folder / "model-00000.safetensors").stat().st_mtime_ns == before


def test_a_save_that_failed_is_told_and_the_next_one_works(tmp_path: Path, tensors: Tensors) -> None:
    parts = {name: Held.of(tensor) for name, tensor in tensors.items()}
    saver = saver_of(tmp_path)
    tmp_path.joinpath("step-000001").mkdir()
    saver.save(facts(1), parts, background=True)
    saver.save(facts(2), parts, background=True)
    saver.wait()
    failed, worked = saver.outcomes()
    assert failed.error is not None
    assert worked.error is None
    assert saver.durable_step == 2


def test_prune_keeps_the_latest_by_number_not_by_name(tmp_path: Path, tensors: Tensors) -> None:
    for step in (999_999, 1_000_000, 2, 1_000_001):
        saved(tmp_path, step, tensors)
    prune(LocalPlace(tmp_path), Retention(last=2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


def test_retention_counts_verified_checkpoints_only() -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 5.0, 50: 4.0}
    known = [Known(step, True, {"eval_loss": loss}) for step, loss in losses.items()]
    assert Retention(last=2).doomed(known) == [10, 20, 30]
    assert Retention(last=1, every=20).doomed(known) == [10, 30]
    assert Retention(last=1, best=2).doomed(known) == [10, 40]
    assert Retention(last=1, best=1, largest=True).doomed(known) == [10, 20, 30]
    unverified = [Known(step, step == 20, {}) for step in losses]
    # 20 alone was found whole: it stays, and so does all that came later and may yet be.
    assert Retention(last=1).doomed(unverified) == [10]
    assert Retention(last=3).doomed([Known(10, False, {}), Known(20, False, {})]) == []


def test_the_last_verified_checkpoint_outlives_newer_damaged_ones(tmp_path: Path, tensors: Tensors) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, tensors)
    for step in (2, 3):
        folder = LocalPlace(tmp_path / step_name(step))
        (folder.path / "model-00000.safetensors").write_bytes(b"gone")
        mark(folder, find_damage(folder))
    assert prune(LocalPlace(tmp_path), Retention(last=1)) == []


@pytest.mark.parametrize("where", ["begin", "create", "publish"])
def test_an_error_that_nobody_thought_of_is_an_outcome(
    tmp_path: Path, tensors: Tensors, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("something new")

    monkeypatch.setattr(LocalPlace, where, fail)
    assert "something new" in str(save(tmp_path, 1, tensors, background=True).error)


def test_writer_that_was_replaced_does_not_touch_its_successors_files(tensors: Tensors) -> None:
    """In a store without renames, where both write to the same folder."""
    place = open_place(f"memory://{os.urandom(4).hex()}")
    parts = {name: Held.of(tensor) for name, tensor in tensors.items()}

    def fenced() -> None:
        raise CheckpointError("replaced")

    new = Saver(place, Exchange(None), Retention())

    def at(where: str, step: int) -> None:
        if where == "write" and new.durable_step < 0:
            new.save(facts(1), parts, background=False)

    old = Saver(place, Exchange(None), Retention(), before_commit=fenced, at=at)
    old.save(facts(1), parts, background=False)
    assert "replaced" in str(old.outcomes()[0].error)
    assert new.outcomes()[0].error is None
    assert find_damage(place.child("step-000001")) == []
    assert len(place.child("step-000001").names()) == 4


def test_place_of_checkpoints_has_one_run(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "c")
    own_place(place, "one")
    own_place(place, "one")
    with pytest.raises(CheckpointError, match=r"another run \(one, this one is other\); give another checkpoint.dir"):
        own_place(place, "other")
