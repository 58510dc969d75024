"""Ulysses: ranks that hold some tokens of all heads become ranks that hold all tokens of some heads, and back.

Attention then needs nothing from other ranks. All tokens are those of the ranks that take part, in their order. Going
backward, gradients take the other way. KV heads that are fewer than ranks go to several of them, each of which has the
one that its query heads need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private import all_to_all

Parts = tuple[Tensor, ...]
"""Tensors that travel in one message, each (batch, heads, tokens, head size)."""
Shape = tuple[int, ...]


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Shape]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Give each rank its tensors, and get from each those of such shapes."""
    sent = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
    received = [sum(map(prod, shapes)) for shapes in incoming]
    flat = all_to_all(_flat([piece for pieces in outgoing for piece in pieces]), received, sent, group)
    return [
        [piece.view(shape) for piece, shape in zip(message.split([*map(prod, shapes)]), shapes, strict=True)]
        for message, shapes in zip(flat.split(received), incoming, strict=True)
    ]


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    # Filled in place: `cat` would copy pieces that are not contiguous twice.
    flat = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(flat.split([piece.numel() for piece in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return flat


def _joined(messages: Iterable[Iterable[Tensor]], dim: int) -> Parts:
    return tuple(torch.cat(pieces, dim) for pieces in zip(*messages, strict=True))


def _to_heads(parts: Parts, lengths: list[int], group: dist.ProcessGroup) -> Parts:
    ranks = len(lengths)
    each = [max(1, x.shape[1] // ranks) for x in parts]
    outgoing = [
        [x.narrow(1, rank * x.shape[1] // ranks, heads) for x, heads in zip(parts, each, strict=True)]
        for rank in range(ranks)
    ]
    incoming = [[(len(x), heads, n, x.shape[3]) for x, heads in zip(parts, each, strict=True)] for n in lengths]
    return _joined(_exchange(outgoing, incoming, group), dim=2)


def _to_tokens(parts: Parts, lengths: list[int], group: dist.ProcessGroup) -> Parts:
    mine = lengths[dist.get_rank(group)]
    outgoing = list(zip(*(x.split(lengths, dim=2) for x in parts), strict=True))
    incoming = [[(*x.shape[:2], mine, x.shape[3]) for x in parts]] * len(lengths)
    return _joined(_exchange(outgoing, incoming, group), dim=1)


def _sum_copies(x: Tensor, heads: int) -> Tensor:
    """The gradient of heads, some of which went to several ranks."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(dim=2)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: list[int], group: dist.ProcessGroup, *parts: Tensor) -> Parts:
        ctx.where, ctx.heads = (lengths, group), [x.shape[1] for x in parts]
        return _to_heads(parts, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = _to_tokens(gradients, *ctx.where)
        return None, None, *(_sum_copies(x, heads) for x, heads in zip(found, ctx.heads, strict=True))


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
    """This rank's heads of queries, keys and values, with the tokens of all ranks, which have `lengths` of them."""
    q, k, v = _SplitHeads.apply(lengths, group, q_BHTD, k_BKTD, v_BKTD)
    return q, k, v


def join_heads(x_BHTD: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """The way back: this rank's tokens, with the heads of all ranks."""
    return _JoinHeads.apply(lengths, group, x_BHTD)
