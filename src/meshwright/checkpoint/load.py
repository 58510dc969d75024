"""Load tensors of a checkpoint: each piece is checked against its digest before anything of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.format import Manifest, digest
from meshwright.errors import CheckpointError


def load_tensors(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a checkpoint one after the other, on the CPU."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        if name not in manifest.tensors:
            raise CheckpointError(f"{folder} has no tensor {name}")
        (piece,) = manifest.tensors[name].pieces
        if Path(piece.file).name != piece.file:
            raise CheckpointError(f"{folder}: {name} is said to lie in {piece.file}, outside of the checkpoint")
        by_file.setdefault(piece.file, []).append(name)
    for file, held in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as reader:
                for name in held:
                    tensor = reader.get_tensor(name)
                    _check(folder, manifest, name, tensor)
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from None


def _check(folder: Path, manifest: Manifest, name: str, tensor: Tensor) -> None:
    entry = manifest.tensors[name]
    (piece,) = entry.pieces
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != entry.shape or dtype != entry.dtype or digest(tensor) != piece.digest:
        raise CheckpointError(
            f"{folder / piece.file} is damaged: {name} is not what was saved; use an earlier checkpoint"
        )
