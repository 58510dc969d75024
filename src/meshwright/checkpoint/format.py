"""The checkpoint as it is kept: a folder per step with `manifest.json` and safetensors files.

The manifest says what the run was at that step, and for each tensor its whole shape, its type and the pieces that make
it up, each with its file and digest. It is the last file to be written and carries a digest of itself: a folder without
a manifest that agrees with itself is not a checkpoint. Version 1 had whole tensors only; it is read as it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.checkpoint.place import Place, open_place
from meshwright.checkpoint.safetensors_file import NAMES, dtype_bytes
from meshwright.errors import CheckpointError, ExitCode, UserError
from meshwright.models.spec import ModelSpec

MANIFEST = "manifest.json"
VERSION = 2
LARGEST_MANIFEST = 256 * 2**20
MOST_SPLIT = 8
"""Along how many dimensions a tensor may be cut into pieces."""


class DamageError(CheckpointError):
    """A checkpoint is not what was saved."""

    exit_code = ExitCode.DAMAGED


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Piece(_Entry):
    """A box of a tensor that lies in one file under one name."""

    file: str
    name: str
    offset: tuple[int, ...]
    """Where the box starts in the whole tensor."""
    shape: tuple[int, ...]
    digest: str
    """xxh3_128 of the raw bytes, hexadecimal."""


class TensorEntry(_Entry):
    """A whole tensor and where its pieces are."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * dtype_bytes(self.dtype)


class FileEntry(_Entry):
    """A file of the checkpoint."""

    nbytes: int
    header: str
    """Digest of its header; those of the pieces cover the rest."""


class Manifest(_Entry):
    """What a checkpoint holds."""

    format: Literal["meshwright-checkpoint"] = "meshwright-checkpoint"
    version: int = VERSION
    step: int = Field(ge=0)
    """Optimizer steps done."""
    position: int = Field(ge=0)
    """Samples taken so far: where the data goes on."""
    strategy: str
    ranks: int = 1
    model: ModelSpec | None = None
    """The shape of a decoder; None for another module, saved from a loop of one's own."""
    run: str = ""
    """Identity of the run; empty where a checkpoint belongs to none."""
    settings: dict[str, Any] = {}
    """The settings that decide what the run computes."""
    seed: int | None = None
    """Of the random numbers: initial weights, order of the data and dropout are functions of it and of the position."""
    corpora: tuple[str, ...] = ()
    """Digests of the packed corpora that the position counts in."""
    metrics: dict[str, float] = {}
    """Of the step, as far as it was measured."""
    saved_at: float = 0.0
    """Seconds since 1970."""
    written_by: str = ""
    state: dict[str, Any] = {}
    """What the parts of the training loop keep between steps."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry]
    """`model.NAME`, `optimizer.KIND.NAME`; `unsent.NAME` and `basis.NAME` of compressed gradients."""

    @property
    def nbytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name."""
    match = re.fullmatch(r"step-(\d{6,18})", name)
    return int(match[1]) if match else None


def list_steps(checkpoints: Place) -> list[int]:
    """The steps that have a folder, oldest first, damaged or not."""
    return sorted(step for name in checkpoints.names() if (step := step_of(name)) is not None)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """The folders of a run's checkpoints that have a manifest, oldest first."""
    found = (checkpoints / step_name(step) for step in list_steps(open_place(checkpoints)))
    return [folder for folder in found if (folder / MANIFEST).exists()]


def digest_of(data: Any) -> str:
    """The digest of bytes, or of anything that lends its bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def write_manifest(manifest: Manifest) -> bytes:
    """The manifest as it is kept: a tensor a line, its own digest at the end."""
    content = json.loads(manifest.model_dump_json())
    lines = [f" {json.dumps(key)}: {_compact(value)}" for key, value in content.items() if key != "tensors"]
    tensors = ",\n".join(f"  {json.dumps(name)}: {_compact(entry)}" for name, entry in content["tensors"].items())
    lines.append(f' "tensors": {{\n{tensors}\n }}')
    lines.append(f' "digest": "{digest_of(_compact(content).encode())}"')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def read_manifest(folder: Place | Path) -> Manifest:
    """The manifest of a checkpoint folder, checked against itself."""
    place = folder if isinstance(folder, Place) else open_place(folder)
    path = place.path_of(MANIFEST)
    try:
        content = json.loads(place.read_all(MANIFEST, LARGEST_MANIFEST))
        version = content.get("version")
        digest = content.pop("digest", None)
    except (FileNotFoundError, NotADirectoryError):
        raise DamageError(f"{place} is not a checkpoint: it has no {MANIFEST}") from None
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise DamageError(f"{path} is damaged: it is empty, cut short or not JSON") from None
    if version == 1 and (digest is not None or "files" in content):
        raise DamageError(f"{path} is damaged: it says to be of version 1 and holds what later ones do")
    if version != 1 and digest != digest_of(_compact(content).encode()):
        raise DamageError(f"{path} is damaged: it is not what was written")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, and this meshwright reads up to {VERSION}; install a newer one"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place_of = ".".join(map(str, first["loc"]))
        raise DamageError(f"{path} is damaged or of another version: {place_of}: {first['msg']}") from None
    named = step_of(str(place).rstrip("/").rpartition("/")[2])
    if named is not None and named != manifest.step:
        raise DamageError(f"{path} is that of step {manifest.step}, in the folder of step {named}")
    for name, entry in manifest.tensors.items():
        _check_entry(path, name, entry)
    return manifest


def _check_entry(path: str, name: str, entry: TensorEntry) -> None:
    """Raise unless the pieces lie inside of the tensor, make it up, and stay in the folder."""
    if entry.dtype not in NAMES:
        raise DamageError(f"{path}: {name} has the unknown dtype {entry.dtype}")
    if any(side < 0 for side in entry.shape):
        raise DamageError(f"{path}: {name} has the impossible shape {list(entry.shape)}")
    for piece in entry.pieces:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", piece.file):
            raise DamageError(f"{path}: {name} is said to lie in '{piece.file}', outside of the checkpoint")
        if len(piece.offset) != len(entry.shape) or len(piece.shape) != len(entry.shape):
            raise DamageError(f"{path}: a piece of {name} has another number of dimensions")
        ends = zip(piece.offset, piece.shape, entry.shape, strict=True)
        if any(first < 0 or length < 0 or first + length > whole for first, length, whole in ends):
            raise DamageError(f"{path}: a piece of {name} lies outside of the tensor")
    if not _make_up(path, name, entry):
        raise DamageError(f"{path}: the pieces of {name} do not make it up")


def _make_up(path: str, name: str, entry: TensorEntry) -> bool:
    """Whether each element of a tensor lies in one piece and no more.

    A sum of boxes is known by its corners, counted with alternating signs: the pieces make up the tensor just when
    their corners cancel out to those of the whole. So it takes one pass, however many pieces there are.
    """
    whole = (tuple(0 for _ in entry.shape), entry.shape)
    boxes = [(piece.offset, piece.shape) for piece in entry.pieces]
    split = [
        dim for dim in range(len(entry.shape)) if any(box[0][dim] or box[1][dim] != whole[1][dim] for box in boxes)
    ]
    if len(split) > MOST_SPLIT:
        raise DamageError(f"{path}: {name} is split along {len(split)} dimensions; {MOST_SPLIT} are the most")
    counts: Counter[tuple[int, ...]] = Counter()
    for sign, (offset, shape) in [(-1, whole), *((1, box) for box in boxes)]:
        if 0 not in shape:
            sides = [((offset[dim], 1), (offset[dim] + shape[dim], -1)) for dim in split]
            for corner in product(*sides):
                counts[tuple(at for at, _ in corner)] += sign * prod(way for _, way in corner)
    return not any(counts.values())
