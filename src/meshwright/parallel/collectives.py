"""Collectives with gradients: what is gathered going forward is summed going backward, and the reverse.

Dimension 1 is that of the tokens. Each function is what ranks that compute different parts of one thing need at the
border between what they hold alike and what they hold in parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private import all_gather, all_reduce, reduce_scatter

TOKENS = 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].contiguous()
        return all_reduce(gradient.to(ctx.dtype or gradient.dtype), ctx.group).to(gradient.dtype), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, TOKENS, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], TOKENS, ctx.group), None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, TOKENS, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], TOKENS, ctx.group), None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, x.ndim - 1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own(gradients[0], ctx.group).contiguous(), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], gradients[0].ndim - 1, ctx.group), None


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the last dimension."""
    return x.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)]


def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole last dimension from ranks that hold equal parts of it, for work that all of them do alike."""
    return _GatherParts.apply(x, group)


def own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the last dimension of what all hold alike, for work that they split."""
    return _OwnPart.apply(x, group)


def copy(x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> Tensor:
    """What all ranks hold alike, for work that they split: its gradient is summed, in that dtype or its own."""
    return _Copy.apply(x, group, dtype)


def add_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what the ranks computed in parts."""
    return _Sum.apply(x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens from ranks that hold a part of them each, for work that they split."""
    return _GatherTokens.apply(x, group)


def add_up_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what the ranks computed in parts, of which each keeps its part of the tokens."""
    return _SumTokens.apply(x, group)
