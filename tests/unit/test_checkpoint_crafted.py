"""Files that somebody has crafted lead nowhere: no code runs, no memory is taken, nothing outside is touched."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import MANIFEST, DamageError, Piece, TensorEntry, _check_entry, read_manifest
from meshwright.checkpoint.load_model import load_model
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.safetensors_file import make_header
from meshwright.checkpoint.training_state import parts_of, restore
from meshwright.errors import CheckpointError
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from tests.unit.checkpoints import Tensors, facts, loaded, rewritten, saved, saver_of


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


@pytest.mark.parametrize(("layers", "expected"), [(9_999, "9,999 layers"), (10**9, "less than or equal to 10000")])
def test_model_of_more_layers_than_tensors_is_refused_at_once(tmp_path: Path, layers: int, expected: str) -> None:
    saver_of(tmp_path).save(facts(1), parts_of(build(preset("tiny"))), background=False)

    def grow(content: dict[str, Any]) -> None:
        content["model"]["num_hidden_layers"] = layers

    rewritten(tmp_path / "step-000001", grow)
    with pytest.raises(CheckpointError, match=expected):
        load_model(tmp_path / "step-000001")


@pytest.mark.parametrize("vocabulary", [2**40, 2**62])
def test_a_model_that_no_file_holds_is_not_built(tmp_path: Path, vocabulary: int) -> None:
    saver_of(tmp_path).save(facts(1), parts_of(build(preset("tiny"))), background=False)

    def grow(content: dict[str, Any]) -> None:
        content["model"]["vocab_size"] = vocabulary
        for name in ("model.model.embed_tokens.weight", "model.lm_head.weight"):
            entry = content["tensors"][name]
            width = entry["shape"][1]
            entry["shape"], first = [vocabulary, width], entry["pieces"][0]
            entry["pieces"] = [{**first, "offset": [0, 0], "shape": [vocabulary, width]}]

    rewritten(tmp_path / "step-000001", grow)
    with pytest.raises(DamageError, match="as it was saved"):
        load_model(tmp_path / "step-000001")


def trained(optimizer_of: Callable[..., torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build(preset("tiny"))
    optimizer = optimizer_of(model.parameters())
    model(torch.arange(20)[None]).mean().backward()
    optimizer.step()
    return model, optimizer


def test_room_for_optimizer_state_is_made_only_for_what_a_file_holds(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    saver_of(tmp_path).save(facts(1), parts_of(model, optimizer), background=False)
    name = "optimizer.exp_avg.model.norm.weight"

    def grow(content: dict[str, Any]) -> None:
        entry = content["tensors"][name]
        entry["shape"] = entry["pieces"][0]["shape"] = [2**50]

    rewritten(tmp_path / "step-000001", grow)
    with pytest.raises(DamageError, match="as it was saved"):
        restore(CheckpointReader(tmp_path / "step-000001"), model, optimizer)

    # And where a file does hold it, only as much as its parameter has.
    parts = parts_of(model, optimizer)
    parts[name] = Held.of(torch.zeros(1000))
    saver_of(tmp_path).save(facts(2), parts, background=False)
    with pytest.raises(CheckpointError, match=r"exp_avg is \[1000\] and its parameter \["):
        restore(CheckpointReader(tmp_path / "step-000002"), model, optimizer)


def test_factored_optimizer_state_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adafactor)
    saver_of(tmp_path).save(facts(1), parts_of(model, optimizer), background=False)
    other = build(preset("tiny"), seed=3)
    its_optimizer = torch.optim.Adafactor(other.parameters())
    restore(CheckpointReader(tmp_path / "step-000001"), other, its_optimizer)
    before, after = parts_of(model, optimizer), parts_of(other, its_optimizer)
    assert before.keys() == after.keys()
    assert all(after[name].local.equal(held.local) for name, held in before.items())


def test_pieces_that_overlap_and_leave_a_hole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.pieces.LARGEST_PIECE", 64)
    folder = saved(tmp_path, 1, {"model.x": torch.randn(8, 8)})

    def shift(content: dict[str, Any]) -> None:
        content["tensors"]["model.x"]["pieces"][1]["offset"] = [1, 0]

    rewritten(folder, shift)
    with pytest.raises(DamageError, match="do not make it up"):
        read_manifest(folder)


Box = tuple[tuple[int, ...], tuple[int, ...]]


def entry_of(shape: tuple[int, ...], boxes: list[Box]) -> TensorEntry:
    pieces = [Piece(file="a.safetensors", name="x", offset=first, shape=sides, digest="") for first, sides in boxes]
    return TensorEntry(shape=shape, dtype="float32", pieces=tuple(pieces))


def fits(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    try:
        _check_entry("manifest.json", "x", entry_of(shape, boxes))
    except DamageError:
        return False
    return True


def cut(first: tuple[int, ...], sides: tuple[int, ...], times: int, choice: random.Random) -> list[Box]:
    """A box cut at random, again and again."""
    dim = choice.randrange(len(sides))
    if not times or sides[dim] < 2:
        return [(first, sides)]
    at = choice.randrange(1, sides[dim])
    left = (*sides[:dim], at, *sides[dim + 1 :])
    right = (*sides[:dim], sides[dim] - at, *sides[dim + 1 :])
    behind = (*first[:dim], first[dim] + at, *first[dim + 1 :])
    return cut(first, left, times - 1, choice) + cut(behind, right, times - 1, choice)


def test_only_pieces_that_make_up_the_tensor_are_taken() -> None:
    choice = random.Random(5)
    for _ in range(300):
        shape = tuple(choice.randint(1, 6) for _ in range(choice.randint(1, 3)))
        boxes = cut((0,) * len(shape), shape, 4, choice)
        choice.shuffle(boxes)
        assert fits(shape, boxes)
        assert not fits(shape, boxes[1:])
        assert not fits(shape, [*boxes, boxes[0]])
        # One of the same size elsewhere: what it covers is held twice, what it covered by none.
        first, sides = boxes[0]
        moved = tuple(choice.randint(0, whole - side) for whole, side in zip(shape, sides, strict=True))
        assert fits(shape, [(moved, sides), *boxes[1:]]) == (moved == first)
    assert fits((), [((), ())])
    assert not fits((), [])
    assert not fits((), [((), ()), ((), ())])
    assert fits((0, 3), [])
    assert fits((0, 3), [((0, 0), (0, 3))])
    assert not fits((-1, 0), [])


def test_many_pieces_are_checked_in_little_time() -> None:
    half = 20_000
    rows: list[Box] = [((row, half), (1, half)) for row in range(half)]
    columns: list[Box] = [((0, column), (half, 1)) for column in range(half)]
    started = time.perf_counter()
    assert fits((half, 2 * half), rows + columns)
    assert time.perf_counter() - started < 20
    deep = (2,) * 40
    assert not fits(deep, [((0,) * 40, (1,) * 40), ((1,) * 40, (1,) * 40)])


@pytest.mark.parametrize("fact", ["step", "position"])
def test_a_count_below_nothing_is_damage(tmp_path: Path, tensors: Tensors, fact: str) -> None:
    folder = saved(tmp_path, 1, tensors)
    rewritten(folder, lambda content: content.update({fact: -1}))
    (damage,) = find_damage(LocalPlace(folder))
    assert f"{fact}: Input should be greater than or equal to 0" in damage.what
