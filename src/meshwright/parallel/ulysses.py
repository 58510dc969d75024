"""Ulysses: ranks that hold some tokens of all heads become ranks that hold all tokens of some heads, and back.

Attention then needs nothing from other ranks. All tokens are those of the ranks that take part, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private import all_to_all


class _Exchange(torch.autograd.Function):
    """Rows for every rank; their gradients go back the way they came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        return all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradients[0], *ctx.back), None, None, None


def split_heads(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, lengths: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of queries, keys and values, with the tokens of all ranks, which have `lengths` of them.

    KV heads that are fewer than ranks are repeated, so that every rank has the one that its query heads need.
    """
    ranks = len(lengths)
    copies = max(1, ranks // k_BKTD.shape[1])
    if copies > 1:
        k_BKTD, v_BKTD = k_BKTD.repeat_interleave(copies, dim=1), v_BKTD.repeat_interleave(copies, dim=1)
    # One message for all three: (ranks, heads of q, k and v, batch, tokens, head size).
    parts = [x.unflatten(1, (ranks, -1)).movedim(0, 2) for x in (q_BHTD, k_BKTD, v_BKTD)]
    heads = [x.shape[1] for x in parts]
    x_RHBTD = torch.cat(parts, dim=1)
    rows = x_RHBTD[0].numel()
    per_token = rows // x_RHBTD.shape[3]
    received = [per_token * length for length in lengths]
    flat = _Exchange.apply(x_RHBTD.flatten(), [rows] * ranks, received, group)
    shape = x_RHBTD.shape[1:3], x_RHBTD.shape[4:]
    pieces = [
        piece.view(*shape[0], length, *shape[1]) for piece, length in zip(flat.split(received), lengths, strict=True)
    ]
    q, k, v = torch.cat(pieces, dim=2).movedim(0, 1).split(heads, dim=1)
    return q, k, v


def join_heads(x_BHTD: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """The way back: this rank's tokens, with the heads of all ranks."""
    ranks = len(lengths)
    batch, heads, _, size = x_BHTD.shape
    sent = [batch * heads * length * size for length in lengths]
    mine = sent[dist.get_rank(group)]
    flat = _Exchange.apply(torch.cat([x.flatten() for x in x_BHTD.split(lengths, dim=2)]), sent, [mine] * ranks, group)
    return flat.view(ranks, batch, heads, -1, size).transpose(0, 1).flatten(1, 2)
