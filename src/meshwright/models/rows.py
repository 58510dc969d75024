"""Rows that are taken in another order and put back, with backward passes that move each row once.

PyTorch's own indexing adds gradients up row by row, since an index could name a row twice, and its copy by index keeps
the copied rows for the backward pass. Here it is known which rows come how often, and only the order is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take_rows(x_NC: Tensor, order_R: Tensor, times: int = 1) -> Tensor:
    """Row order[r] // times for every r; no number comes twice in `order`, and all are below rows x times."""
    taken: Tensor = _Take.apply(x_NC, order_R, times)
    return taken


def put_rows(x_RC: Tensor, order_R: Tensor, count: int) -> Tensor:
    """`count` rows, of which number order[r] is row r, and the others are zero; no number comes twice."""
    put: Tensor = _Put.apply(x_RC, order_R, count)
    return put


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_R: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.times, ctx.rows = times, x_NC.shape[0]
        return x_NC.index_select(0, order_R // times if times > 1 else order_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        each = _spread(gradients[0], order_R, ctx.rows * ctx.times)
        return each.unflatten(0, (ctx.rows, ctx.times)).sum(dim=1) if ctx.times > 1 else each, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, order_R: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order_R)
        return _spread(x_RC, order_R, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, order_R), None, None


def _spread(x_RC: Tensor, order_R: Tensor, count: int) -> Tensor:
    shape = count, *x_RC.shape[1:]
    whole = x_RC.new_empty(shape) if x_RC.shape[0] == count else x_RC.new_zeros(shape)
    return whole.index_copy_(0, order_R, x_RC)
