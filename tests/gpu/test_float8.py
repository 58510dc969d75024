"""Linears in 8 bits on a GPU: its kernels against the reference, and against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.float8 import E4M3, E5M2, Recipe, cast, float8_linear, transposed

RECIPES = [Recipe(scaling, gradient, 16) for scaling in ("rowwise", "tensorwise") for gradient in (True, False)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 48), (272, 528), (2048, 64), (128, 64)])
@pytest.mark.parametrize("scales", [True, False])
def test_transposes_are_those_of_the_reference(dtype: torch.dtype, shape: tuple[int, int], scales: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    values, _ = cast(torch.randn(shape, generator=draw), dtype, by_row=True)
    factors = 0.5 ** torch.randint(0, 12, (shape[0], 1), generator=draw).float() if scales else None
    found = transposed(values.cuda(), factors.cuda() if factors is not None else None)
    assert torch.equal(found.cpu().view(torch.uint8), transposed(values, factors).view(torch.uint8))


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_outputs_and_gradients_are_as_exact_as_8_bits_can_be(recipe: Recipe, compiled: bool) -> None:
    torch._dynamo.reset()
    draw = torch.Generator("cuda").manual_seed(1)
    x, y_grad = (torch.randn(256, size, device="cuda", generator=draw).bfloat16() for size in (192, 320))
    weight = torch.randn(320, 192, device="cuda", generator=draw)
    linear = partial(float8_linear, bias=None, recipe=recipe)
    held = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = (torch.compile(linear) if compiled else linear)(*held)
    y.backward(y_grad)
    exact = [value.double().requires_grad_() for value in (x, weight)]
    F.linear(*exact).backward(y_grad.double())
    assert 0.005 < apart(y, F.linear(*exact)) < 0.04
    for ours, theirs in zip(held, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == ours.dtype
        assert apart(ours.grad, theirs.grad) < (0.04 if recipe.by_row else 0.065)
