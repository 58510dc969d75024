"""Clipping of plain gradients is torch's, with a loss scale taken out first."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.parallel.norm import clip_grad_norm_

SHAPES = [(3, 5), (7,), (), (2, 1, 4), (0, 3)]


def parameters(seed: int = 0, factor: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters with random gradients; the last one has none."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
    for parameter in made:
        parameter.grad = (torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * factor).to(dtype)
    return [*made, torch.zeros(4, dtype=dtype, requires_grad=True)]


def gradients(held: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in held if parameter.grad is not None]


@given(st.integers(0, 99), st.floats(1e-3, 1e3), st.floats(1e-2, 1e2))
def test_norm_and_clipped_gradients_are_torchs(seed: int, factor: float, max_norm: float) -> None:
    ours, theirs = parameters(seed, factor), parameters(seed, factor)
    found = clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_of_gradients_stays_and_the_norm_is_wide(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    found = clip_grad_norm_(ours, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.to(dtype), expected)
    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_clipping_scales_all_gradients_to_the_largest_norm() -> None:
    weights = [torch.zeros(2, 2, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(5)]
    weights[0].grad, weights[1].grad = torch.full((2, 2), 2.0), torch.tensor([0.0, 3.0, 0.0])
    assert float(clip_grad_norm_(weights, 2.5)) == 5.0
    assert float(torch.cat([w.grad.flatten() for w in weights if w.grad is not None]).norm()) == pytest.approx(2.5)
    assert float(weights[1].grad[1]) == pytest.approx(1.5)


@pytest.mark.parametrize("max_norm", [0.0, 10.0])
def test_gradients_are_left_alone_without_or_below_a_limit(max_norm: float) -> None:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_([weight], max_norm)) == 5.0
    assert weight.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9])
def test_scale_is_divided_out_before_the_limit_is_looked_at(max_norm: float) -> None:
    ours, plain = parameters(factor=1024.0), parameters()
    torch.testing.assert_close(clip_grad_norm_(ours, max_norm, scale=1024.0), clip_grad_norm_(plain, max_norm))
    torch.testing.assert_close(gradients(ours), gradients(plain))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_norm_that_is_no_number_is_reported(bad: float, max_norm: float) -> None:
    held = parameters()
    held[0].grad[1, 2] = bad
    found = float(clip_grad_norm_(held, max_norm, scale=8.0))
    assert math.isnan(found) if math.isnan(bad) else found == math.inf


def test_generator_and_single_tensor_are_taken() -> None:
    weights = parameters()
    expected = torch.cat([gradient.flatten() for gradient in gradients(weights)]).norm()
    torch.testing.assert_close(clip_grad_norm_((weight for weight in weights), 1.0), expected)
    clipped = torch.cat([gradient.flatten() for gradient in gradients(weights)]).norm()
    assert float(clipped) == pytest.approx(1.0, rel=1e-5)
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_(weight, 1.0)) == 5.0
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])


def test_no_gradients_have_norm_zero() -> None:
    assert float(clip_grad_norm_([], 1.0)) == 0
    assert float(clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0, scale=2.0)) == 0
    empty = torch.zeros(0, 3, requires_grad=True)
    empty.grad = torch.zeros(0, 3)
    assert float(clip_grad_norm_([empty], 1.0)) == 0
