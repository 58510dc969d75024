"""Save a checkpoint: into a fresh temporary folder, everything on the disk before the manifest, one rename at the end.

A checkpoint is either whole or not there: a crash or a full disk leaves the earlier ones untouched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.format import MANIFEST, Manifest, Piece, TensorEntry, digest, list_checkpoints, step_folder
from meshwright.errors import CheckpointError
from meshwright.files import flush


def describe_tensors(files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, TensorEntry]:
    """Manifest entries of whole tensors, given as file name -> tensor name -> tensor on the CPU."""
    return {
        name: TensorEntry(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            pieces=(
                Piece(
                    file=file,
                    name=name,
                    offset=(0,) * tensor.ndim,
                    shape=tuple(tensor.shape),
                    digest=digest(tensor),
                ),
            ),
        )
        for file, tensors in files.items()
        for name, tensor in tensors.items()
    }


def save_checkpoint(checkpoints: Path, manifest: Manifest, files: Mapping[str, dict[str, Tensor]]) -> Path:
    """Write a checkpoint and give its folder; an equal step that is already there is left as it is."""
    target = step_folder(checkpoints, manifest.step)
    if (target / MANIFEST).exists():
        return target
    temporary = checkpoints / f".{target.name}.{os.getpid()}"
    try:
        for remains in (temporary, target):
            shutil.rmtree(remains, ignore_errors=True)
        temporary.mkdir(parents=True)
        _check_space(checkpoints, files)
        for file, tensors in files.items():
            save_file(tensors, temporary / file)
            flush(temporary / file)
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        flush(temporary / MANIFEST)
        flush(temporary)
        temporary.rename(target)
        flush(checkpoints)
        flush(checkpoints.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} could not be saved in {checkpoints}: {error}"
        ) from error
    return target


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the latest checkpoints, and what interrupted saves left behind."""
    for old in list_checkpoints(checkpoints)[:-keep]:
        # Without its manifest it is no checkpoint, should the removal be cut short.
        (old / MANIFEST).unlink()
        shutil.rmtree(old)
    whole = list_checkpoints(checkpoints)
    for folder in checkpoints.iterdir():
        if re.fullmatch(r"step-\d+|\.step-\d+\.\d+", folder.name) and folder not in whole:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(checkpoints: Path, files: Mapping[str, dict[str, Tensor]]) -> None:
    needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    free = shutil.disk_usage(checkpoints).free
    if needed > free:
        raise CheckpointError(
            f"a checkpoint needs {needed:,} bytes in {checkpoints} and {free:,} are free ({needed - free:,} missing)"
        )
