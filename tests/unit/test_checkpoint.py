"""A checkpoint is whole or not there: crashes, full disks and damage never cost an earlier one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.format import Manifest, list_checkpoints, read_manifest, step_folder
from meshwright.checkpoint.load import load_tensors
from meshwright.checkpoint.load_model import load_model
from meshwright.checkpoint.save import describe_tensors, prune, save_checkpoint
from meshwright.checkpoint.training_state import gather_state, restore_model, restore_optimizer
from meshwright.config import TrainSection
from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.parallel.parallelize import parallelize
from meshwright.training.optimizer import make_optimizer

Files = dict[str, dict[str, Tensor]]


def manifest_of(files: Files, step: int) -> Manifest:
    spec = preset("tiny")
    return Manifest(step=step, position=0, strategy="dp=1", model=spec, state={}, tensors=describe_tensors(files))


def save(folder: Path, step: int, files: Files) -> Path:
    return save_checkpoint(folder, manifest_of(files, step), files)


@pytest.fixture
def files() -> Files:
    odd = torch.arange(10).to(torch.bfloat16)
    return {"a.safetensors": {"x": torch.randn(3, 5), "scalar": torch.tensor(4.0)}, "b.safetensors": {"odd": odd}}


def test_every_type_comes_back_bit_for_bit(tmp_path: Path, files: Files) -> None:
    folder = save(tmp_path, 3, files)
    assert folder == step_folder(tmp_path, 3)
    manifest = read_manifest(folder)
    wanted = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    found = dict(load_tensors(folder, manifest, wanted))
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items())


def test_training_state_comes_back_so_that_the_next_step_is_the_same(tmp_path: Path) -> None:
    def step(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = model(torch.arange(20)[None]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = build(preset("tiny"), dtype=torch.float64)
    optimizer = make_optimizer(parallelize(model, "dp=1"), TrainSection())
    step(model, optimizer)
    saved = save(tmp_path, 1, gather_state(model, optimizer))
    other = build(preset("tiny"), seed=9, dtype=torch.float64)
    other_optimizer = make_optimizer(parallelize(other, "dp=1"), TrainSection())
    restore_model(other, saved, read_manifest(saved))
    restore_optimizer(other, other_optimizer, saved, read_manifest(saved))
    for _ in range(3):
        assert step(model, optimizer).equal(step(other, other_optimizer))


@pytest.mark.parametrize("place", [-1, 12])
def test_flipped_bit_is_found(tmp_path: Path, files: Files, place: int) -> None:
    folder = save(tmp_path, 1, files)
    path = folder / "a.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a.safetensors (is damaged|cannot be read)"):
        dict(load_tensors(folder, read_manifest(folder), ["x", "scalar"]))


def test_missing_file_is_named(tmp_path: Path, files: Files) -> None:
    folder = save(tmp_path, 1, files)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors cannot be read"):
        dict(load_tensors(folder, read_manifest(folder), ["odd"]))


def test_small_disk_says_how_much_is_missing_and_keeps_the_old_checkpoint(small_disk: Path, files: Files) -> None:
    save(small_disk, 1, files)
    with pytest.raises(CheckpointError, match=r"needs 4,000,000 bytes in .* missing\)"):
        save(small_disk, 2, {"big.safetensors": {"big": torch.zeros(1_000_000)}})
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]
    assert list_checkpoints(small_disk) == [step_folder(small_disk, 1)]


def test_disk_that_fills_while_saving_leaves_nothing_that_looks_whole(
    small_disk: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_disk, 1, files)
    # Another process takes the space between the check and the write.
    monkeypatch.setattr(save_module, "_check_space", lambda *_: None)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(small_disk, 2, {"big.safetensors": {"big": torch.zeros(1_000_000)}})
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]


def test_crash_before_the_rename_leaves_no_checkpoint(tmp_path: Path, files: Files) -> None:
    child = os.fork()
    if child == 0:
        save_module.Path.rename = lambda *_: os._exit(7)  # type: ignore[assignment,method-assign]
        save(tmp_path, 1, files)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list_checkpoints(tmp_path) == []
    assert len(list(tmp_path.glob(".step-*"))) == 1
    save(tmp_path, 2, files)
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_prune_keeps_the_latest_by_number_not_by_name(tmp_path: Path, files: Files) -> None:
    for step in (999_999, 1_000_000, 2, 1_000_001):
        save(tmp_path, step, files)
    prune(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


def test_folders_that_are_not_checkpoints_are_neither_listed_nor_in_the_way(tmp_path: Path, files: Files) -> None:
    (tmp_path / "step-000001.bak").mkdir()
    (tmp_path / "step-000002").mkdir()  # What a removal that was cut short leaves.
    (tmp_path / "step-000002/a.safetensors").write_text("rest")
    assert list_checkpoints(tmp_path) == []
    save(tmp_path, 2, files)
    assert list_checkpoints(tmp_path) == [step_folder(tmp_path, 2)]
    (tmp_path / "step-000003").mkdir()
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.bak", "step-000002"]


def test_file_outside_of_the_checkpoint_is_not_read(tmp_path: Path, files: Files) -> None:
    folder = save(tmp_path, 1, files)
    manifest = (folder / "manifest.json").read_text().replace("b.safetensors", "../b.safetensors")
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        dict(load_tensors(folder, read_manifest(folder), ["odd"]))


def test_a_saved_step_is_never_overwritten(tmp_path: Path, files: Files) -> None:
    folder = save(tmp_path, 1, files)
    before = (folder / "a.safetensors").stat().st_mtime_ns
    save(tmp_path, 1, {"a.safetensors": {"x": torch.zeros(1)}})
    assert (folder / "a.safetensors").stat().st_mtime_ns == before


def test_load_model_finds_presets_runs_and_checkpoints(tmp_path: Path) -> None:
    model = load_model("tiny", seed=5)
    assert model(torch.arange(6)[None]).shape == (1, 6, model.spec.vocab_size)
    optimizer = make_optimizer(parallelize(model, "dp=1"), TrainSection())
    folder = save(tmp_path / "checkpoints", 4, gather_state(model, optimizer))
    for place in (tmp_path, folder):
        assert load_model(place).lm_head.weight.equal(model.lm_head.weight)
    with pytest.raises(CheckpointError, match="neither a folder nor a preset"):
        load_model("nothing-such")
    with pytest.raises(CheckpointError, match="no run, no checkpoint"):
        load_model(tmp_path.parent)
