"""Ulysses: ranks that hold some tokens of all heads become ranks that hold all tokens of some heads, and back.

Attention then needs nothing from other ranks. All tokens are those of the ranks that take part, in their order. Going
backward, gradients take the other way. Buffers are filled in place: at most two copies of what travels exist.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private import all_to_all

Parts = tuple[Tensor, ...]
"""Tensors that travel in one message, each (batch, heads, tokens, head size)."""


def _to_heads(parts: Parts, lengths: list[int], group: dist.ProcessGroup) -> Parts:
    ranks, (tokens, size) = len(lengths), parts[0].shape[2:]
    shapes = [(x.shape[0], x.shape[1] // ranks) for x in parts]
    rows = [batch * heads * size for batch, heads in shapes]
    sent = parts[0].new_empty(ranks, sum(rows) * tokens)
    for x, place, shape in zip(parts, sent.split([n * tokens for n in rows], dim=1), shapes, strict=True):
        place.unflatten(1, (*shape, tokens, size)).copy_(x.unflatten(1, (ranks, -1)).transpose(0, 1))
    sizes = [sum(rows) * length for length in lengths]
    received = all_to_all(sent.flatten(), [sent.shape[1]] * ranks, sizes, group)
    del sent
    found = tuple(received.new_empty(*shape, sum(lengths), size) for shape in shapes)
    wholes = zip(*(x.split(lengths, dim=2) for x in found), strict=True)
    for from_rank, of_rank, length in zip(received.split(sizes), wholes, lengths, strict=True):
        for piece, x in zip(from_rank.split([n * length for n in rows]), of_rank, strict=True):
            x.copy_(piece.view_as(x))
    return found


def _to_tokens(parts: Parts, lengths: list[int], group: dist.ProcessGroup) -> Parts:
    ranks, size, tokens = len(lengths), parts[0].shape[3], lengths[dist.get_rank(group)]
    shapes = [x.shape[:2] for x in parts]
    rows = [batch * heads * size for batch, heads in shapes]
    sizes = [sum(rows) * length for length in lengths]
    sent = parts[0].new_empty(sum(sizes))
    wholes = zip(*(x.split(lengths, dim=2) for x in parts), strict=True)
    for to_rank, of_rank, length in zip(sent.split(sizes), wholes, lengths, strict=True):
        for piece, x in zip(to_rank.split([n * length for n in rows]), of_rank, strict=True):
            piece.view(x.shape).copy_(x)
    received = all_to_all(sent, sizes, [sum(rows) * tokens] * ranks, group).view(ranks, -1)
    del sent
    pieces = received.split([n * tokens for n in rows], dim=1)
    return tuple(
        piece.unflatten(1, (*shape, tokens, size)).transpose(0, 1).flatten(1, 2)
        for piece, shape in zip(pieces, shapes, strict=True)
    )


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: list[int], group: dist.ProcessGroup, *parts: Tensor) -> Parts:
        ctx.where = lengths, group
        return _to_heads(parts, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_tokens(gradients, *ctx.where)


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: list[int], group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.where = lengths, group
        return _to_tokens((x,), lengths, group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_heads(gradients, *ctx.where)


def split_heads(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, lengths: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of queries, keys and values, with the tokens of all ranks, which have `lengths` of them.

    KV heads that are fewer than ranks are repeated, so that every rank has the one that its query heads need.
    """
    copies = max(1, len(lengths) // k_BKTD.shape[1])
    if copies > 1:
        k_BKTD, v_BKTD = k_BKTD.repeat_interleave(copies, dim=1), v_BKTD.repeat_interleave(copies, dim=1)
    q, k, v = _SplitHeads.apply(lengths, group, q_BHTD, k_BKTD, v_BKTD)
    return q, k, v


def join_heads(x_BHTD: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """The way back: this rank's tokens, with the heads of all ranks."""
    return _JoinHeads.apply(lengths, group, x_BHTD)
