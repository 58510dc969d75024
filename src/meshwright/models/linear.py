"""Products of activations with weights: one, or several that share their input.

Weights may be stored wider than the model computes (float32 under bf16). They are rounded inside of the product, so
that their gradient comes out of it in the dtype in which it is stored: never rounded, and nothing has to widen it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.reads import seen

HALVES = (torch.bfloat16, torch.float16)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From input, weight and bias to the output."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the weight's transpose, in the dtype of x."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    product: Tensor = _Rounded.apply(x, 1, weight, *(() if bias is None else (bias,)))
    return product


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    reads_itself = True
    product: Product = staticmethod(linear)
    way = "plain"
    """The name of that product: layers with the same one can multiply together."""

    def forward(self, x: Tensor) -> Tensor:
        weight = seen(self, "weight")
        assert weight is not None
        return self.product(x, weight, seen(self, "bias"))


def multiply_by(layer: nn.Linear, product: Product, way: str) -> None:
    """From now on, a linear layer multiplies by that function, of that name, what it sees of its weight and bias."""
    vars(layer)["product"], vars(layer)["way"] = product, way
    if not isinstance(layer, Linear):
        layer.forward = partial(_forward, layer, product)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def linears(x: Tensor, *layers: nn.Module, apart: bool = False) -> tuple[Tensor, ...]:
    """What each of several linear layers makes of x; in compiled code by one product, where that costs no copy.

    `apart` leaves their gradients apart: where they are large, to lay them side by side costs more than is gained.
    """
    if torch.compiler.is_compiling() and all(_alike(layer, layers[0]) for layer in layers):
        weights, biases = _seen(layers, "weight"), _seen(layers, "bias")
        if all(weight.dtype != x.dtype for weight in weights) and len(biases) in (0, len(weights)):
            together = _together(layers[0], x, weights, biases, apart)
            if together is not None:
                return together
    return tuple(layer(x) for layer in layers)


def _alike(layer: nn.Module, other: nn.Module) -> bool:
    return isinstance(layer, Linear) and isinstance(other, Linear) and layer.way == other.way


def _together(
    layer: nn.Module, x: Tensor, weights: list[Tensor], biases: list[Tensor], apart: bool
) -> tuple[Tensor, ...] | None:
    assert isinstance(layer, Linear)
    if layer.way == "plain" and apart:
        found: tuple[Tensor, ...] = _RoundedApart.apply(x, len(weights), *weights, *biases)
        return found
    if apart:
        return None
    if layer.way == "plain":
        y: Tensor = _Rounded.apply(x, len(weights), *weights, *biases)
    else:
        y = layer.product(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return y.split([weight.shape[0] for weight in weights], dim=-1)


def _seen(layers: tuple[nn.Module, ...], name: str) -> list[Tensor]:
    found = [seen(layer, name) for layer in layers]
    return [parameter for parameter in found if parameter is not None]


class _Rounded(torch.autograd.Function):
    """The product with weights that lie one below the other, rounded to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *held: Tensor) -> Tensor:
        weights, biases = held[:count], held[count:]
        ctx.has_bias = bool(biases)
        ctx.save_for_backward(x, *weights)
        return _rounded(x, weights, biases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        y_grad = gradients[0]
        x_grad = y_grad @ _stacked(weights, y_grad.dtype) if ctx.needs_input_grad[0] else None
        rows = [weight.shape[0] for weight in weights]
        y_NO = y_grad.reshape(-1, y_grad.shape[-1])
        weight_grads = wide_product(y_NO.mT, x.reshape(-1, x.shape[-1]), weights[0].dtype).split(rows)
        bias_grads = y_NO.sum(dim=0, dtype=weights[0].dtype).split(rows) if ctx.has_bias else ()
        return x_grad, None, *weight_grads, *bias_grads


class _RoundedApart(torch.autograd.Function):
    """The same product, whose parts are outputs of their own: their gradients come one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *held: Tensor) -> tuple[Tensor, ...]:
        weights, biases = held[:count], held[count:]
        ctx.has_bias = bool(biases)
        ctx.save_for_backward(x, *weights)
        return _rounded(x, weights, biases).split([weight.shape[0] for weight in weights], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_NC = x.reshape(-1, x.shape[-1])
        y_grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        x_grad = sum_of_products(y_grads, [weight.to(x.dtype) for weight in weights])
        pairs = zip(y_grads, weights, strict=True)
        weight_grads = [wide_product(y_grad.mT, x_NC, weight.dtype) for y_grad, weight in pairs]
        bias_grads = [y_grad.sum(dim=0, dtype=weights[0].dtype) for y_grad in y_grads] if ctx.has_bias else []
        return x_grad.view_as(x), None, *weight_grads, *bias_grads


# An operation by itself, since a compiler would copy each sum before it adds to it.
@torch.library.custom_op("meshwright::sum_of_products", mutates_args=())
def sum_of_products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The sum of the products of each of several matrices with its partner."""
    total = left[0] @ right[0]
    for one, other in zip(left[1:], right[1:], strict=True):
        torch.addmm(total, one, other, out=total)
    return total


@sum_of_products.register_fake
def _(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return left[0].new_empty(left[0].shape[0], right[0].shape[1])


def _rounded(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> Tensor:
    return F.linear(x, _stacked(weights, x.dtype), _stacked(biases, x.dtype) if biases else None)


def _stacked(parts: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if len(parts) > 1 else parts[0].to(dtype)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a times b, added up and given in a wider dtype than theirs where the device can."""
    if _is_widened(a, dtype):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def add_wide_product(sum_: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a times b, added to what there is of a sum, in its memory."""
    if sum_ is None:
        return wide_product(a, b, dtype)
    if _is_widened(a, dtype):
        return torch.addmm(sum_, a, b, out_dtype=dtype, out=sum_)
    return sum_.add_(a @ b)


def _is_widened(a: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device gives products of such tensors in that dtype."""
    return a.is_cuda and dtype == torch.float32 and a.dtype in HALVES
