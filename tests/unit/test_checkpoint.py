"""A checkpoint is whole or not there: crashes, full disks and damage never cost an earlier one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import MANIFEST, DamageError, Manifest, list_checkpoints, read_manifest, step_name
from meshwright.checkpoint.load_model import load_model
from meshwright.checkpoint.marks import mark, verified_at
from meshwright.checkpoint.pieces import Held, PieceSavePlanner
from meshwright.checkpoint.place import LocalPlace, open_place, own_place
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.retention import Known, Retention, prune
from meshwright.checkpoint.safetensors_file import make_header
from meshwright.checkpoint.saver import Outcome, Saver
from meshwright.checkpoint.training_state import parts_of, restore
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.config import TrainSection
from meshwright.errors import CheckpointError, ExitCode
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.parallel.exchange import Exchange
from meshwright.parallel.parallelize import parallelize
from meshwright.training.optimizer import make_optimizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
Tensors = Mapping[str, Tensor]


def facts(step: int, **others: object) -> Manifest:
    return Manifest.model_validate(
        {"step": step, "position": 0, "strategy": "dp=1", "model": preset("tiny"), "tensors": {}, **others}
    )


def saver_of(folder: Path, **settings: object) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(LocalPlace(folder), Exchange(None), Retention(), **settings)  # type: ignore[arg-type]


def save(folder: Path, step: int, tensors: Tensors, background: bool = False, **others: object) -> Outcome:
    saver = saver_of(folder)
    parts = {name: Held.of(tensor) for name, tensor in tensors.items()}
    saver.save(facts(step, **others), parts, background=background)
    saver.wait()
    (outcome,) = saver.outcomes()
    return outcome


def saved(folder: Path, step: int, tensors: Tensors, **others: object) -> Path:
    assert save(folder, step, tensors, **others).error is None
    return folder / step_name(step)


def loaded(folder: Path, like: Tensors) -> Tensors:
    room = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    load_parts(CheckpointReader(folder), {name: Held.of(tensor) for name, tensor in room.items()})
    return room


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "model.x": torch.randn(3, 5),
        "model.half": torch.arange(10).to(torch.bfloat16),
        "optimizer.step.x": torch.tensor(4.0),
        "optimizer.none.x": torch.empty(0, 3),
        "optimizer.flags.x": torch.tensor([True, False]),
        "optimizer.count.x": torch.tensor([7], dtype=torch.int64),
        "optimizer.wide.x": torch.randn(4, 2, dtype=torch.float64).T,
    }


@pytest.mark.parametrize("background", [False, True])
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, tensors: Tensors, background: bool) -> None:
    outcome = save(tmp_path, 3, tensors, background)
    assert outcome.error is None
    assert not outcome.damage
    found = loaded(tmp_path / "step-000003", tensors)
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert verified_at(LocalPlace(tmp_path / "step-000003")) is not None


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
    for place in range(0, len(sound), 11):
        changed = sound[:place] + ("7" if sound[place] != "7" else "8") + sound[place + 1 :]
        path.write_text(changed)
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


def test_folders_that_are_not_checkpoints_are_not_listed(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "step-000001.bak").mkdir()
    (tmp_path / "step-000002").mkdir()
    assert list_checkpoints(tmp_path) == []
    saved(tmp_path, 3, tensors)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003"]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that somebody made to agree with itself."""
    from meshwright.checkpoint.format import _compact, digest_of

    content = json.loads((folder / MANIFEST).read_text())
    content.pop("digest")
    change(content)
    content["digest"] = digest_of(_compact(content).encode())
    (folder / MANIFEST).write_text(json.dumps(content))


def test_crafted_manifests_lead_nowhere(tmp_path: Path, tensors: Tensors) -> None:
    outside = tmp_path / "outside.safetensors"
    for number, path in enumerate(("../outside.safetensors", str(outside), "..", "a/b.safetensors", "x.bin")):
        folder = saved(tmp_path / "c", number + 1, tensors)
        shutil.copy(folder / "model-00000.safetensors", outside)

        def change(content: dict[str, Any], path: str = path) -> None:
            content["tensors"]["model.x"]["pieces"][0]["file"] = path

        rewritten(folder, change)
        with pytest.raises(DamageError, match="outside of the checkpoint"):
            loaded(folder, tensors)


class Payload:
    """What a pickle may do to whoever reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", ["model-00000.safetensors", MANIFEST])
def test_pickles_are_not_run(tmp_path: Path, tensors: Tensors, file: str) -> None:
    folder = saved(tmp_path, 1, tensors)
    (folder / file).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(DamageError, match=file):
        loaded(folder, tensors)
    assert find_damage(LocalPlace(folder))
    assert not (tmp_path / "ran").exists()


def test_a_link_to_a_checkpoint_elsewhere_is_not_one_of_the_run(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path / "elsewhere", 1, tensors)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/step-000001").symlink_to(folder)
    with pytest.raises(CheckpointError, match="is a link"):
        LocalPlace(tmp_path / "here").child("step-000001")


@pytest.mark.parametrize("where", ["begin", "create", "publish"])
def test_an_error_that_nobody_thought_of_is_an_outcome(
    tmp_path: Path, tensors: Tensors, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("something new")

    monkeypatch.setattr(LocalPlace, where, fail)
    assert "something new" in str(save(tmp_path, 1, tensors, background=True).error)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_pipes_and_folders_are_no_files(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / "model-00000.safetensors"
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DamageError, match=r"is a link|not a plain file|cannot be read"):
        loaded(folder, tensors)


def test_sizes_are_seen_to_be_there_before_memory_is_taken(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / "model-00000.safetensors"
    data = path.read_bytes()
    # A header of eight exabytes.
    path.write_bytes(b"\xff" * 7 + b"\x7f" + data[8:])
    with pytest.raises(DamageError, match="header cannot be"):
        loaded(folder, tensors)

    def enlarge(content: dict[str, Any]) -> None:
        content["tensors"]["model.x"]["shape"] = [10**9, 10**9]
        content["tensors"]["model.x"]["pieces"][0]["shape"] = [10**9, 10**9]

    path.write_bytes(data)
    rewritten(folder, enlarge)
    found = find_damage(LocalPlace(folder))
    assert [damage.tensor for damage in found] == ["model.x"]

    def grow(content: dict[str, Any]) -> None:
        content["model"]["hidden_size"] = 2**40

    rewritten(folder, grow)
    with pytest.raises(CheckpointError):
        load_model(folder)


def test_crafted_files_take_no_memory_and_end_in_words(tmp_path: Path, tensors: Tensors) -> None:
    folder = saved(tmp_path, 1, tensors)
    path = folder / "model-00000.safetensors"
    header = b"[" * 200_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "header cannot be read" in find_damage(LocalPlace(folder))[0].what

    # A tensor of a tebibyte, in a file that says to be as long and holds nothing.
    folder = saved(tmp_path, 2, {"model.x": torch.zeros(4)})
    path = folder / "model-00000.safetensors"
    raw, made = make_header({"model.x": ("float32", (2**38,))})
    path.write_bytes(raw)
    os.truncate(path, made.file_bytes)

    def grow(content: dict[str, Any]) -> None:
        entry = content["tensors"]["model.x"]
        entry["shape"] = entry["pieces"][0]["shape"] = [2**38]
        content["files"]["model-00000.safetensors"] = {"nbytes": made.file_bytes, "header": made.digest}

    rewritten(folder, grow)
    read = LocalPlace.read
    amounts: list[int] = []

    def few(place: LocalPlace, name: str, start: int, buffer: memoryview) -> int:
        amounts.append(len(buffer))
        return read(place, name, start, buffer) if start < 2**28 else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPlace, "read", few)
        assert "cut short" in find_damage(LocalPlace(folder))[0].what
    assert max(amounts) <= 2**24


def test_model_of_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    saver_of(tmp_path).save(facts(1), parts_of(build(preset("tiny"))), background=False)

    def grow(content: dict[str, Any]) -> None:
        content["model"]["num_hidden_layers"] = 10**9

    rewritten(tmp_path / "step-000001", grow)
    with pytest.raises(CheckpointError, match="1,000,000,000 layers"):
        load_model(tmp_path / "step-000001")


def test_pieces_that_overlap_and_leave_a_hole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.pieces.LARGEST_PIECE", 64)
    folder = saved(tmp_path, 1, {"model.x": torch.randn(8, 8)})

    def shift(content: dict[str, Any]) -> None:
        content["tensors"]["model.x"]["pieces"][1]["offset"] = [1, 0]

    rewritten(folder, shift)
    with pytest.raises(DamageError, match="do not make it up"):
        read_manifest(folder)


def test_manifest_whose_version_was_changed_is_damaged_not_newer(tmp_path: Path, tensors: Tensors) -> None:
    path = saved(tmp_path, 1, tensors) / MANIFEST
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(DamageError, match="not what was written"):
        read_manifest(path.parent)


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
