"""Hugging Face folders: read a model from one, write a model as one. safetensors only; no pickle, no foreign code.

Reading holds the model and one tensor of the files in memory; writing holds the model and one shard.
"""

from __future__ import annotations

import json
import shutil
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder
from meshwright.models.hf_config import config_from_spec, read_json, read_spec
from meshwright.models.hf_files import TensorFiles, open_files, write_files
from meshwright.models.hf_weights import EMBEDDING, HEAD, Dialect, Piece, pieces, pieces_to_read
from meshwright.models.initialize import build_empty
from meshwright.models.mixture import mixtures
from meshwright.models.parts import part_like
from meshwright.models.shapes import shapes_of

__all__ = ["fill_from_hf", "load_hf", "read_spec", "save_hf"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "byte_tokenizer.json",
)


@torch.no_grad()
def load_hf(folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """A decoder with the folder's weights, in training mode; `dtype` defaults to that of the files."""
    folder = Path(folder)
    spec = read_spec(folder)
    with open_files(folder) as files:
        wanted = pieces_to_read(files.shapes, spec, str(folder))
        model = build_empty(spec, device, files.dtype((piece.theirs for piece in wanted), dtype))
    fill_from_hf(model, folder)
    return model


@torch.no_grad()
def fill_from_hf(model: Decoder, folder: Path | str) -> None:
    """Copy the folder's weights into a decoder of the same shape, whole or split; one tensor at a time."""
    folder = Path(folder)
    with open_files(folder) as files:
        wanted = pieces_to_read(files.shapes, model.spec, str(folder))
        if model.spec.tie_word_embeddings:
            _check_tied(files, wanted)
        parameters = dict(model.named_parameters())
        # A pipeline rank has the parameters of its own stages.
        wanted = [piece for piece in wanted if piece.ours in parameters]
        for name, parts in groupby(sorted(wanted, key=lambda piece: piece.ours), key=lambda piece: piece.ours):
            target = parameters[name]
            # A split parameter is put together once on the CPU, and each rank keeps its part.
            value = torch.empty(target.shape, dtype=target.dtype) if isinstance(target, DTensor) else target
            for piece in parts:
                read = files.read(piece.theirs, piece.their_part)
                value[piece.ours_part].copy_(read.T if piece.transposed else read)
            if value is not target:
                target.copy_(part_like(value, target))


def save_hf(
    model: Decoder,
    folder: Path | str,
    *,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_folder: Path | str | None = None,
) -> None:
    """Write the model as a Hugging Face folder; it appears whole or not at all, and never over another."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; give another name or remove it")
    config = config_from_spec(model.spec)
    _check_whole(model)
    _check_expert_bias(model)
    token_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer_folder is not None:
        token_ids |= _token_ids(Path(tokenizer_folder))
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        # Older readers know the one name of the dtype, newer ones prefer the other.
        _write_json(partial / "config.json", {**config, **token_ids, "dtype": dtype, "torch_dtype": dtype})
        _write_json(partial / "generation_config.json", {"_from_model_config": True, **token_ids})
        if tokenizer_folder is not None:
            _copy_tokenizer(Path(tokenizer_folder), partial)
        write_files(partial, pieces(model.spec, Dialect()), dict(model.named_parameters()), max_shard_bytes)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_tied(files: TensorFiles, wanted: list[Piece]) -> None:
    """The embedding of a tied model must not be accompanied by another head."""
    embedding = next(piece.theirs for piece in wanted if piece.ours == EMBEDDING)
    if HEAD in files.shapes and embedding != HEAD and not torch.equal(files.read(HEAD), files.read(embedding)):
        raise CheckpointError(
            f"{files.folder}: config.json says tie_word_embeddings, but {HEAD} differs from {embedding}; "
            "set tie_word_embeddings to false in config.json to use both"
        )


def _check_whole(model: Decoder) -> None:
    have = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if have != shapes_of(model.spec) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise CheckpointError(
            "only a whole model on one device can be written, and this one is split, or is not what its spec says; "
            "save a checkpoint and export that"
        )


def _check_expert_bias(model: Decoder) -> None:
    if any(bool(mixture.expert_bias.any()) for mixture in mixtures(model)):
        raise CheckpointError(
            f"the experts are balanced by a bias, and {model.spec.family} files have no place for it: the exported "
            "model would choose other experts. To export it all the same, set `expert_bias` of every mixture to zero "
            "first and measure what that costs; a model that is meant for export can balance its experts with "
            "router_aux_loss_coef instead of router_bias_update_rate"
        )


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise CheckpointError(f"{source} has no tokenizer files (looked for {', '.join(TOKENIZER_FILES)})")
    for name in found:
        shutil.copyfile(source / name, target / name)


def _token_ids(source: Path) -> dict[str, Any]:
    """The ids that begin, end and pad a text, from a model's own settings or from the tokenizer's files."""
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        settings |= read_json(source / name) if (source / name).is_file() else {}
    named = read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
    vocabulary = _vocabulary(source)
    for kind in ("bos", "eos", "pad"):
        token = named.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if settings.get(f"{kind}_token_id") is None and token in vocabulary:
            settings[f"{kind}_token_id"] = vocabulary[token]
    return {f"{kind}_token_id": settings.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")}


def _vocabulary(source: Path) -> dict[str, int]:
    """Ids of the tokens that the tokenizer's JSON files name."""
    vocabulary: dict[str, int] = {}
    for name in ("vocab.json", "added_tokens.json"):
        vocabulary |= read_json(source / name) if (source / name).is_file() else {}
    if (source / "tokenizer.json").is_file():
        tokenizer = read_json(source / "tokenizer.json")
        model = tokenizer.get("model", {}).get("vocab", {})
        vocabulary |= model if isinstance(model, dict) else {token: index for index, (token, _) in enumerate(model)}
        vocabulary |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}
    return vocabulary


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
