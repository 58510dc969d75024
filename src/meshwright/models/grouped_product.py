"""Products of groups of rows, each with a weight of its own, in one kernel.

An operation by itself, so that a compiler leaves its inputs lying as they are: the kernels of gradients sum over rows
that lie one after the other, and demand multiples of eight rows in a group where a compiler has turned them around.

Shapes: R rows, E groups, C columns, O columns of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def grouped_product(x_RC: Tensor, weight_EOC: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of group e, which end before row ends[e], times the transpose of weight[e]."""
    return F.grouped_mm(x_RC, weight_EOC.mT, offs=ends_E)


@torch.library.custom_op("meshwright::grouped_product_gradients", mutates_args=())
def _gradients(y_RO: Tensor, x_RC: Tensor, weight_EOC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    y_RO, x_RC = y_RO.contiguous(), x_RC.contiguous()
    return F.grouped_mm(y_RO, weight_EOC, offs=ends_E), F.grouped_mm(y_RO.mT, x_RC, offs=ends_E)


@grouped_product.register_fake
def _(x_RC: Tensor, weight_EOC: Tensor, ends_E: Tensor) -> Tensor:
    return x_RC.new_empty(x_RC.shape[0], weight_EOC.shape[1])


@_gradients.register_fake
def _(y_RO: Tensor, x_RC: Tensor, weight_EOC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return x_RC.new_empty(x_RC.shape), weight_EOC.new_empty(weight_EOC.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gradients(gradient, *ctx.saved_tensors), None


grouped_product.register_autograd(_backward, setup_context=_keep)
