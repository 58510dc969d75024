"""Linears whose matrix products run in 8-bit floats, scaled by what the tensors in hand hold.

    forward          x (M, K) by the weight (N, K)        fast accumulation
    data gradient    of the output (M, N) by the weight   exact accumulation: gradients are sums of what nearly cancels
    weight gradient  of the output (M, N) by x (M, K)     exact accumulation, or in the dtype of x

- tensorwise: one scale for a tensor. Gradients are e5m2, for the range between a batch's largest and smallest tokens
  must fit under one scale; x and weights are e4m3, which rounds half as coarsely.
- rowwise: a scale for every row of the left factor and column of the right one, so an outlier spoils its own row only,
  and e4m3 serves for gradients too. The weight gradient runs along the tokens, so there each factor has one scale, the
  largest of its rows': what was cast by rows is turned around in 8 bits, and x and the output's gradient are cast once.

Scales are powers of two. Then a value rounds alike whatever its scale was taken from (short of values that are
thousands of times smaller than the largest), so products by rows, by columns and on parts of a matrix, as ranks that
split it have them, see the same numbers. It costs up to one of the 18 powers of two that e4m3 spans.

The backward pass keeps x and the weight as they came, as a linear in bf16 does, and casts them again: linears that
read the same x share what is kept, and gathered weights can be put away in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.models.linear import linear, wide_product
from meshwright.torch_private import wanted_gradients

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16
"""Tensor cores take 16 bytes of a row at once: whatever lies along a row of a factor or result comes in multiples."""
# Far below what a gradient holds, and its inverse times the largest e5m2 is still a float32.
_LEAST = 1e-30
_EXPONENT_BITS = -(2**23)

Scaled = tuple[Tensor, Tensor]
"""Eight-bit values and by what to multiply them, as `torch._scaled_mm` takes it: one number, or a column of them."""


@dataclass(frozen=True)
class Recipe:
    """How a linear computes in 8 bits."""

    scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    weight_gradient: bool = True
    """Whether the weight gradient does too."""
    smallest: int = 512
    """Weights with a dimension below it are multiplied as they are: casts cost more than the product gains."""

    @property
    def by_row(self) -> bool:
        """Whether every row has a scale of its own."""
        return self.scaling == "rowwise"

    @property
    def gradients(self) -> torch.dtype:
        """The dtype of gradients."""
        return E4M3 if self.by_row else E5M2

    def obstacle(self, shape: torch.Size) -> str | None:
        """Why a weight of that shape is not multiplied in 8 bits; None where it is."""
        if any(length % MULTIPLE for length in shape):
            return f"not in multiples of {MULTIPLE}"
        return f"smaller than {self.smallest}" if min(shape) < self.smallest else None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """What `F.linear` gives, by products in 8 bits where the weight's shape allows it; gradients have their own dtypes.

    The weight may be stored wider than x.
    """
    if recipe.obstacle(weight.shape) is not None:
        return linear(x, weight, bias)
    # A view of it: a leaf of the graph cannot be asked whether a backward pass will reach it.
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight.view(weight.shape), recipe)
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(y.dtype)


def cast(x: Tensor, dtype: torch.dtype, by_row: bool) -> Scaled:
    """A matrix in 8 bits, with one scale or one for each row."""
    largest = x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax()
    factor = torch.finfo(dtype).max / largest.float().clamp(min=_LEAST)
    factor = (factor.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    # Nothing is clamped: the largest value lands below the dtype's, or rounds to it. What is infinite becomes no number
    # and what is none stays so, for those who watch the gradients.
    return (x.float() * factor).to(dtype), factor.reciprocal()


def turn(x: Scaled) -> Scaled:
    """The transpose of a matrix in 8 bits, under one scale: the largest of its rows'."""
    values, scale = x
    if scale.numel() == 1:
        return transposed(values, None), scale
    one = scale.amax()
    # Powers of two: nothing is rounded but what is thousands of times smaller than the largest.
    return transposed(values, scale / one), one


def transposed(values: Tensor, factors: Tensor | None) -> Tensor:
    """The columns of a matrix, each in one piece; its rows times factors before."""
    if values.is_cuda:
        return _transposed(values, factors)
    if factors is not None:
        values = (values.float() * factors).to(values.dtype)
    return values.t().contiguous()


# An operation by itself, since compilers write such a copy byte by byte.
@torch.library.custom_op("meshwright::float8_transposed", mutates_args=())
def _transposed(values: Tensor, factors: Tensor | None) -> Tensor:
    from meshwright.models.float8_kernel import transposed

    return transposed(values, factors)


@_transposed.register_fake
def _(values: Tensor, factors: Tensor | None) -> Tensor:
    return values.new_empty(values.shape[1], values.shape[0])


def scaled_mm(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """The product of a (M, K) and the transpose of b (N, K), both with their rows in one piece."""
    return multiply_on(a[0].device.type)(a, b, dtype, fast)


def multiply_on(device: str) -> Callable[[Scaled, Scaled, torch.dtype, bool], Tensor]:
    """What multiplies on a kind of device."""
    return by_kernel if device == "cuda" else by_reference


def by_kernel(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """PyTorch's product: its second factor lies column by column; scales are (M, 1) and (1, N), or one number each."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=dtype, use_fast_accum=fast)


def by_reference(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """The same numbers, but for the order of sums, on devices that have no such product or have it for show."""
    return ((a[0].float() @ b[0].float().t()) * a[1] * b[1].t()).to(dtype)


class _Product(torch.autograd.Function):
    """x (M, K) by the transpose of a weight (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        narrow = weight.to(x.dtype)
        return scaled_mm(cast(x, E4M3, recipe.by_row), cast(narrow, E4M3, recipe.by_row), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (x, weight), recipe = gradients, ctx.saved_tensors, ctx.recipe
        wanted = wanted_gradients(ctx)
        of_x = of_weight = None
        if wanted[0]:
            scaled = cast(gradient, recipe.gradients, recipe.by_row)
            of_x = scaled_mm(scaled, _columns(weight.to(x.dtype), recipe), x.dtype, fast=False)
        if wanted[1]:
            # Its sums run over the tokens, which must come in multiples then.
            if recipe.weight_gradient and len(x) % MULTIPLE == 0:
                # Written so that a compiler sees what is cast for two products as one cast.
                scaled = turn(cast(gradient, recipe.gradients, recipe.by_row))
                of_weight = scaled_mm(scaled, turn(cast(x, E4M3, recipe.by_row)), weight.dtype, fast=False)
            else:
                of_weight = wide_product(gradient.t(), x, weight.dtype)
        return of_x, of_weight, None


def _columns(weight: Tensor, recipe: Recipe) -> Scaled:
    """The columns of a weight in 8 bits, each in one piece."""
    if recipe.by_row:
        values, scale = cast(weight.t(), E4M3, by_row=True)
        return values.contiguous(), scale
    return turn(cast(weight, E4M3, by_row=False))
