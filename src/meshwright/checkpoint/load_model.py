"""Load a model from wherever one may be: a preset's name, a run, a checkpoint, a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.find import latest_checkpoint
from meshwright.checkpoint.format import MANIFEST
from meshwright.checkpoint.place import Place
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.training_state import check_size, restore, spec_of
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import CheckpointError, UserError
from meshwright.models.decoder import Decoder
from meshwright.models.hf import load_hf
from meshwright.models.initialize import build, build_empty
from meshwright.models.presets import preset


def load_model(
    folder_or_preset: str | Path, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Decoder:
    """A decoder in evaluation mode; calling it on token ids gives logits. A preset gets fresh weights from `seed`."""
    path = Path(folder_or_preset)
    if (path / "config.json").exists():
        return load_hf(path, device=device, dtype=dtype).eval()
    checkpoint = find_checkpoint(folder_or_preset)
    if checkpoint is not None:
        reader = CheckpointReader(checkpoint)
        spec = spec_of(reader.manifest)
        check_size(reader.manifest, spec)
        # The manifest and its spec may agree on sizes that no file has.
        for name in reader.manifest.tensors:
            if name.startswith("model."):
                reader.see(name)
        saved = reader.manifest.tensors["model.model.embed_tokens.weight"].dtype
        model = build_empty(spec, device, getattr(torch, saved))
        restore(reader, model)
        return (model if dtype is None else model.to(dtype)).eval()
    if path.exists():
        raise CheckpointError(
            f"{path} is no run, no checkpoint and no Hugging Face folder (no manifest.json, no config.json)"
        )
    try:
        spec = preset(str(folder_or_preset))
    except UserError as error:
        raise CheckpointError(f"{folder_or_preset} is neither a folder nor a preset: {error}") from None
    return build(spec, seed, device, dtype or torch.float32).eval()


def find_checkpoint(path: str | Path) -> Place | None:
    """The checkpoint that a path means: itself, or the latest one of a run."""
    try:
        return latest_checkpoint(path)
    except CheckpointError:
        return None


def tokenizer_folder_of(path: str | Path) -> Path | None:
    """Where the tokenizer of a run, of a checkpoint in one, or of a Hugging Face folder lies, if it has one."""
    path = Path(path)
    if (path / "config.json").exists():
        return path
    run = path.resolve().parent.parent if (path / MANIFEST).exists() else path
    return run / "tokenizer" if (run / "tokenizer").is_dir() else None


def load_tokenizer_of(path: str | Path) -> Tokenizer:
    """The tokenizer that belongs to a run, a checkpoint in one, or a Hugging Face folder."""
    return load_tokenizer(tokenizer_folder_of(path) or Path(path) / "tokenizer")
