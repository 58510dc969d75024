"""What is saved comes back bit for bit, in every release to come; damage and mismatches are named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import MANIFEST, DamageError, list_checkpoints, read_manifest
from meshwright.checkpoint.load_model import load_model
from meshwright.checkpoint.marks import verified_at
from meshwright.checkpoint.pieces import Held, PieceSavePlanner
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.training_state import parts_of, restore
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.config import TrainSection
from meshwright.errors import CheckpointError, ExitCode
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.parallel.parallelize import parallelize
from meshwright.training.optimizer import make_optimizer
from tests.unit.checkpoints import Tensors, facts, loaded, rewritten, save, saved, saver_of

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("background", [False, True])
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, tensors: Tensors, background: bool) -> None:
    outcome = save(tmp_path, 3, tensors, background)
    assert outcome.error is None
    assert not outcome.damage
    found = loaded(tmp_path / "step-000003", tensors)
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert verified_at(LocalPlace(tmp_path / "step-000003")) is not None


def test_large_tensors_are_cut_so_that_a_few_rows_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.pieces.LARGEST_PIECE", 256)
    whole = torch.randn(50, 7)
    folder = saved(tmp_path, 1, {"model.x": whole})
    manifest = read_manifest(folder)
    assert [piece.shape for piece in manifest.tensors["model.x"].pieces] == [(9, 7)] * 5 + [(5, 7)]
    room = torch.zeros(4, 3)
    load_parts(CheckpointReader(folder), {"model.x": Held(room, (7, 2), (50, 7))})
    assert room.equal(whole[7:11, 2:5])


def test_other_tools_read_the_files(tmp_path: Path, tensors: Tensors) -> None:
    from safetensors.torch import load_file

    folder = saved(tmp_path, 1, tensors)
    assert load_file(folder / "model-00000.safetensors")["model.x"].equal(tensors["model.x"])


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
    saver = saver_of(tmp_path)
    saver.save(facts(1), parts_of(model, optimizer), background=False)
    other = build(preset("tiny"), seed=9, dtype=torch.float64)
    other_optimizer = make_optimizer(parallelize(other, "dp=1"), TrainSection())
    restore(CheckpointReader(tmp_path / "step-000001"), other, other_optimizer)
    for _ in range(3):
        assert step(model, optimizer).equal(step(other, other_optimizer))


@pytest.mark.parametrize("name", ["model-00000.safetensors", "optimizer-00000.safetensors"])
def test_any_flipped_bit_is_found_and_named(tmp_path: Path, tensors: Tensors, name: str) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / name
    sound = path.read_bytes()
    for place in range(0, len(sound), 7):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with pytest.raises(DamageError, match=f"{name} is damaged"):
            loaded(folder, tensors)
        found = find_damage(LocalPlace(folder))
        assert {damage.file for damage in found} == {name}
    path.write_bytes(sound)
    assert find_damage(LocalPlace(folder)) == []


def test_damage_names_the_tensor(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (damage,) = find_damage(LocalPlace(folder))
    assert damage.tensor == "model.half"


def test_any_changed_character_of_the_manifest_is_found(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / MANIFEST
    sound = path.read_text()
    before = read_manifest(folder)
    changes = [(place, "7" if sound[place] != "7" else "8") for place in range(0, len(sound), 11)]
    # Each digit of what the manifest says of itself, as every other digit: version 1 had no digest.
    facts_end = sound.index('"model"')
    digits = [place for place in range(facts_end) if sound[place].isdigit()]
    changes += [(place, digit) for place in digits for digit in "0123456789" if digit != sound[place]]
    assert any(sound[:place].endswith('"version": ') and digit == "1" for place, digit in changes)
    for place, character in changes:
        path.write_text(sound[:place] + character + sound[place + 1 :])
        try:
            found = read_manifest(folder)
        except CheckpointError:
            continue
        raise AssertionError(f"character {place} of the manifest may be changed: {found == before}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model-00000.safetensors").unlink(), "model-00000.safetensors is missing"),
        (lambda folder: os.truncate(folder / "model-00000.safetensors", 200), "damaged: .* bytes long|not lie inside"),
        (lambda folder: os.truncate(folder / "model-00000.safetensors", 5), "cut short"),
        (lambda folder: (folder / MANIFEST).write_text(""), "empty, cut short or not JSON"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "empty, cut short or not JSON"),
        (lambda folder: (folder / MANIFEST).unlink(), "not a checkpoint"),
    ],
)
def test_each_damage_has_its_own_words(
    tmp_path: Path, tensors: Tensors, damage: Callable[[Path], object], message: str
) -> None:
    folder = saved(tmp_path, 1, tensors)
    damage(folder)
    with pytest.raises(DamageError, match=message) as caught:
        loaded(folder, tensors)
    assert caught.value.exit_code == ExitCode.DAMAGED
    assert find_damage(LocalPlace(folder))


def test_folders_that_are_not_checkpoints_are_not_listed(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "step-000001.bak").mkdir()
    (tmp_path / "step-000002").mkdir()
    assert list_checkpoints(tmp_path) == []
    saved(tmp_path, 3, tensors)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003"]


def test_manifest_whose_version_was_changed_is_damaged_not_newer(tmp_path: Path, tensors: Tensors) -> None:
    path = saved(tmp_path, 1, tensors) / MANIFEST
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(DamageError, match="not what was written"):
        read_manifest(path.parent)


def test_mismatches_are_named(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    for wanted, message in (
        ({"model.y": torch.zeros(1)}, "no tensor model.y"),
        ({"model.x": torch.zeros(5, 3)}, r"float32 \[3, 5\] in the checkpoint and float32 \[5, 3\] here"),
        ({"model.x": torch.zeros(3, 5, dtype=torch.float64)}, "and float64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            loaded(folder, wanted)


def test_missing_and_extra_tensors_of_a_model_are_named(tmp_path: Path) -> None:
    model = build(preset("tiny"))
    parts = parts_of(model)
    removed = parts.pop("model.model.norm.weight")
    saver = saver_of(tmp_path)
    saver.save(facts(1), parts, background=False)
    with pytest.raises(CheckpointError, match=r"model lacks: model\.norm\.weight"):
        load_model(tmp_path / "step-000001")
    saver.save(facts(2), {**parts, "model.model.norm.weight": removed, "model.more": removed}, background=False)
    with pytest.raises(CheckpointError, match="has beyond its spec: more"):
        load_model(tmp_path / "step-000002")


def test_incomplete_optimizer_state_is_named(tmp_path: Path) -> None:
    model = build(preset("tiny"))
    optimizer = make_optimizer(parallelize(model, "dp=1"), TrainSection())
    model(torch.arange(20)[None]).mean().backward()
    optimizer.step()
    parts = parts_of(model, optimizer)
    del parts["optimizer.exp_avg_sq.model.norm.weight"]
    saver_of(tmp_path).save(facts(1), parts, background=False)
    with pytest.raises(CheckpointError, match=r"incomplete: exp_avg_sq of model\.norm\.weight"):
        restore(CheckpointReader(tmp_path / "step-000001"), model, optimizer)


def test_a_newer_format_says_what_to_do(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)

    def newer(content: dict[str, Any]) -> None:
        content["version"] = 99

    rewritten(folder, newer)
    with pytest.raises(CheckpointError, match="format version 99, .* install a newer one"):
        read_manifest(folder)


def test_checkpoints_of_version_1_load_for_ever(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = FIXTURES / "checkpoint-v1/step-000002"
    model = load_model(folder)
    optimizer = make_optimizer(parallelize(model, "dp=1"), TrainSection())
    restore(CheckpointReader(folder), model, optimizer)
    expected = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    found = {name: held.local for name, held in parts_of(model, optimizer).items()}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert find_damage(LocalPlace(folder)) == []
    shutil.copytree(folder, tmp_path / "step-000002")
    data = bytearray((tmp_path / "step-000002/model.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "step-000002/model.safetensors").write_bytes(data)
    with pytest.raises(DamageError, match="not what was saved"):
        load_model(tmp_path / "step-000002")


def test_load_model_finds_presets_runs_and_checkpoints(tmp_path: Path) -> None:
    model = load_model("tiny", seed=5)
    assert model(torch.arange(6)[None]).shape == (1, 6, model.spec.vocab_size)
    saver_of(tmp_path / "checkpoints").save(facts(4), parts_of(model), background=False)
    for place in (tmp_path, tmp_path / "checkpoints/step-000004"):
        assert load_model(place).lm_head.weight.equal(model.lm_head.weight)
    with pytest.raises(CheckpointError, match="neither a folder nor a preset"):
        load_model("nothing-such")
    with pytest.raises(CheckpointError, match="no run, no checkpoint"):
        load_model(tmp_path.parent)


def test_pytorchs_own_functions_use_the_storage(tmp_path: Path) -> None:
    state = {"model.x": torch.randn(6, 4), "model.y": torch.randn(3)}
    dcp.save(dict(state), storage_writer=CheckpointWriter(tmp_path, facts(1)), no_dist=True)
    room = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(room, storage_reader=CheckpointReader(tmp_path / "step-000001"), no_dist=True)
    assert all(room[name].equal(tensor) for name, tensor in state.items())
    parts = {name: Held.of(tensor) for name, tensor in state.items()}
    writer = CheckpointWriter(tmp_path, facts(2))
    dcp.save(parts, storage_writer=writer, planner=PieceSavePlanner(), no_dist=True)
    assert all(loaded(tmp_path / "step-000002", state)[name].equal(tensor) for name, tensor in state.items())
