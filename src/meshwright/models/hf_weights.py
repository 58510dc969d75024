"""Where each of our tensors lies in Hugging Face's files: one table of pieces, read in both directions.

Most names are the same. Experts are stacked here and apart there; GPT-2 has other names, fuses queries, keys and values
and stores its matrices transposed. A piece at a time is in memory beside the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.shapes import shapes_of
from meshwright.models.spec import ModelSpec

Part = tuple[slice | int, ...]
"""An index into a tensor; empty means all of it."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERTS = ".mlp.experts."
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_GPT2 = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of buffers that old files hold beside the weights."""


class Piece(NamedTuple):
    """A part of one of our tensors and the part of a file's tensor that holds it."""

    ours: str
    ours_part: Part
    theirs: str
    their_shape: tuple[int, ...]
    """Of the whole tensor in the file."""
    their_part: Part
    transposed: bool


class Dialect(NamedTuple):
    """What differs between the files of one family."""

    gpt2_prefix: str = "transformer."
    """Files of the bare GPT-2 body have no prefix."""
    stacked_experts: bool = False
    """transformers 5 can write experts as it holds them: stacked, gate and up in one tensor."""


def dialect_of(names: Iterable[str]) -> Dialect:
    """Which way of naming a set of files uses."""
    names = list(names)
    prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
    return Dialect(prefix, any(name.endswith(".experts.gate_up_proj") for name in names))


def pieces(spec: ModelSpec, dialect: Dialect) -> Iterator[Piece]:
    """Every part of every parameter, with its place in the files."""
    for name, shape in shapes_of(spec).items():
        if spec.family == "gpt2":
            yield _gpt2_piece(name, shape, dialect)
        elif _EXPERTS in name and dialect.stacked_experts:
            yield _stacked_piece(name, shape)
        elif _EXPERTS in name:
            yield from _expert_pieces(spec, name, shape)
        else:
            sparse = spec.family == "mixtral" and not dialect.stacked_experts
            theirs = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if sparse else name
            yield Piece(name, (), theirs, shape, (), False)


def _expert_pieces(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    layer, projection = name.split(_EXPERTS)
    for expert in range(shape[0]):
        theirs = f"{layer}{_EXPERTS}{expert}.{projection}.weight"
        if spec.family == "mixtral":
            theirs = f"{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL[projection]}.weight"
        yield Piece(name, (expert,), theirs, shape[1:], (), False)


def _stacked_piece(name: str, shape: tuple[int, ...]) -> Piece:
    layer, projection = name.split(_EXPERTS)
    if projection == "down_proj":
        return Piece(name, (), name, shape, (), False)
    count, inner, width = shape
    half = slice(0, inner) if projection == "gate_proj" else slice(inner, 2 * inner)
    return Piece(name, (), f"{layer}{_EXPERTS}gate_up_proj", (count, 2 * inner, width), (slice(None), half), False)


def _gpt2_piece(name: str, shape: tuple[int, ...], dialect: Dialect) -> Piece:
    if name == HEAD:
        return Piece(name, (), name, shape, (), False)
    module, kind = name.removeprefix("model.").rsplit(".", 1)
    layer = ""
    if module.startswith("layers."):
        _, number, module = module.split(".", 2)
        layer = f"h.{number}."
    theirs = f"{dialect.gpt2_prefix}{layer}{_GPT2[module]}.{kind}"
    transposed = module.endswith("_proj") and kind == "weight"
    # The files' matrices are (in, out).
    stored = shape[::-1] if transposed else shape
    if _GPT2[module] != "attn.c_attn":
        return Piece(name, (), theirs, stored, (), transposed)
    width, third = stored[-1], "qkv".index(module.removeprefix("self_attn.")[0])
    columns = slice(third * width, (third + 1) * width)
    their_part: Part = (slice(None), columns) if transposed else (columns,)
    return Piece(name, (), theirs, (*stored[:-1], 3 * width), their_part, transposed)


def pieces_to_read(found: Mapping[str, tuple[int, ...]], spec: ModelSpec, where: str) -> list[Piece]:
    """The pieces to read from files that hold these names and shapes; whatever does not fit is a CheckpointError."""
    wanted = list(pieces(spec, dialect_of(found)))
    if spec.tie_word_embeddings:
        wanted = [_where_tied(piece, found) for piece in wanted]
    expected = {piece.theirs: piece.their_shape for piece in wanted}
    allowed = {HEAD} if spec.tie_word_embeddings else set()
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    surplus = [name for name in found if name not in expected.keys() | allowed and not name.endswith(_BUFFERS)]
    wrong = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    kinds = {"missing": missing, "not expected": surplus, "of another shape": wrong}
    if problems := [f"{len(names)} {kind}: {_a_few(names)}" for kind, names in kinds.items() if names]:
        raise CheckpointError(
            f"{where}: the tensors are not those of the config.json beside them: {'; '.join(problems)}"
        )
    return wanted


def _where_tied(piece: Piece, found: Mapping[str, tuple[int, ...]]) -> Piece:
    """The one tensor of tied embeddings may be there under the head's name only."""
    elsewhere = piece.ours == EMBEDDING and piece.theirs not in found and HEAD in found
    return piece._replace(theirs=HEAD) if elsewhere else piece


def _a_few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def join(parts: Iterable[Piece], parameters: Mapping[str, Tensor]) -> Tensor:
    """The file's tensor that these pieces make up; a copy unless it is the whole of one of ours."""
    parts = list(parts)
    first = parameters[parts[0].ours]
    if not parts[0].ours_part and not parts[0].their_part and not parts[0].transposed:
        return first.detach()
    whole = torch.empty(parts[0].their_shape, dtype=first.dtype, device=first.device)
    for piece in parts:
        value = parameters[piece.ours].detach()[piece.ours_part]
        whole[piece.their_part] = value.T if piece.transposed else value
    return whole
