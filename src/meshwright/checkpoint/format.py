"""The checkpoint on disk: a folder per step with `manifest.json` and safetensors files.

The manifest says what the run was at that step, and for each tensor its whole shape, its type and the pieces that make
it up, each with its file and digest. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.spec import ModelSpec

MANIFEST = "manifest.json"


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


class Manifest(_Entry):
    """What a checkpoint holds."""

    format: Literal["meshwright-checkpoint"] = "meshwright-checkpoint"
    version: Literal[1] = 1
    step: int
    """Optimizer steps done."""
    position: int
    """Samples taken so far: where the data goes on."""
    strategy: str
    model: ModelSpec
    corpora: tuple[str, ...] = ()
    """Digests of the packed corpora that the position counts in."""
    state: dict[str, Any]
    """What the parts of the training loop keep between steps."""
    tensors: dict[str, TensorEntry]
    """`model.NAME`, `optimizer.KIND.NAME`."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:06d}"


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    steps = {path: re.fullmatch(r"step-(\d+)", path.name) for path in checkpoints.glob("step-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match and (path / MANIFEST).exists()}
    return sorted(found, key=lambda path: found[path])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged or of another version: {place}: {first['msg']}") from None


def digest(tensor: Tensor) -> str:
    """The digest of a contiguous CPU tensor's bytes."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data)
