"""Moments in 8 bits: how far they are off, what stays exact, and that codes survive a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.optim import codes
from meshwright.optim.codes import BLOCK, FIRST_MOMENT, SECOND_MOMENT, Code, blocks_of, decode, encode, encode_part
from meshwright.optim.random_rounding import Place, high_half, random_bits

BOTH = pytest.mark.parametrize("code", [FIRST_MOMENT, SECOND_MOMENT], ids=["first", "second"])


def moments(code: Code, count: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    """Values over many powers of ten, as moments have them."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=draw) * torch.exp(spread * torch.randn(count, generator=draw)) * 1e-4
    return values if code.signed else values.square()


def again(code: Code, values: Tensor, bits: Tensor | None = None) -> Tensor:
    return decode(code, *encode(code, values, bits))


@BOTH
@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_nearest_codes_are_off_by_a_sixteenth_or_half_of_the_smallest_step(code: Code, count: int) -> None:
    values = moments(code, count)
    found, scales = encode(code, values)
    assert (found.dtype, len(scales)) == (torch.uint8, blocks_of(count))
    largest = scales.repeat_interleave(BLOCK)[:count]
    bound = torch.maximum(values.abs() / 16, largest * (0.5 / code.steps)) * (1 + 1e-6)
    if not code.signed:
        # What is not zero is never taken for zero, which is off by a whole step at most.
        bound = torch.maximum(bound, (values > 0) * largest / code.steps)
    assert ((decode(code, found, scales) - values).abs() <= bound).all()


@BOTH
def test_random_rounding_of_codes_is_right_on_average(code: Code) -> None:
    values = moments(code, BLOCK)
    rounds = 4000
    total, squares = torch.zeros(BLOCK, dtype=torch.float64), torch.zeros(BLOCK, dtype=torch.float64)
    for step in range(rounds):
        bits = high_half(random_bits(Place(8), torch.tensor(float(step)), 0, BLOCK))
        error = again(code, values, bits).double() - values.double()
        total += error
        squares += error.square()
    # Those that are not zero and below the smallest step are meant to be too large.
    fair = values.abs() > values.abs().max() / code.steps
    error = ((squares[fair] / rounds).sqrt() / rounds**0.5).clamp(min=1e-30)
    assert float((total[fair] / rounds / error).abs().max()) < 5
    assert float((total[fair] / rounds / error).sum().abs()) / math.sqrt(int(fair.sum())) < 4


@BOTH
def test_zeros_stay_zeros_and_only_zeros_become_zeros_of_second_moments(code: Code) -> None:
    values = moments(code, 512)
    values[:256] = 0
    values[300] = 0
    values[301] = values.abs().max() * 1e-30
    bits = torch.zeros(512, dtype=torch.int32)
    found = again(code, values, bits)
    assert not found[:256].any()
    assert not found[300]
    assert bool(found[301]) == (not code.signed)
    assert not again(code, torch.full((256,), 1e-35)).any()


@BOTH
def test_an_outlier_takes_little_from_its_neighbours(code: Code) -> None:
    values = torch.linspace(0.5, 1.5, 512) * 1e-5
    if code.signed:
        values[::2] *= -1
    values[7] *= 1000.0
    found = again(code, values)
    others = torch.arange(512) != 7
    assert found[7] == values[7]
    assert ((found - values).abs() <= values.abs() / 16 * (1 + 1e-6))[others].all()


@BOTH
def test_codes_of_decoded_values_are_the_same_codes(code: Code) -> None:
    """So a state that was saved in float32 is the same state when it is loaded."""
    for seed in range(20):
        bits = high_half(random_bits(Place(seed), torch.tensor(1.0), 0, 5000))
        found, scales = encode(code, moments(code, 5000, seed=seed), bits)
        once_more, same = encode(code, decode(code, found, scales))
        assert torch.equal(scales, same)
        # A negative zero has no sign when it comes back.
        negative_zero = (found == 0x80) & code.signed
        assert torch.equal(found[~negative_zero], once_more[~negative_zero])
        assert torch.equal(decode(code, found, scales), decode(code, once_more, same))


@BOTH
def test_all_codes_are_different_numbers_in_order(code: Code) -> None:
    top = code.exponents << codes.MANTISSA
    values = decode(code, torch.arange(top + 1, dtype=torch.uint8), torch.ones(1))
    assert values[0] == 0
    assert values[-1] == 1
    assert (values.diff() > 0).all()
    assert values[1] == 1 / code.steps


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_makes_the_scale_infinite(code: Code, bad: float) -> None:
    values = moments(code, 512)
    values[300] = bad
    _, scales = encode(code, values)
    assert scales.isinf().tolist() == [False, True]


@pytest.mark.parametrize("shape", [(7, 100), (3, 5, 33), (1000,), (4, 512), (1, 1)])
def test_rows_of_a_part_are_those_of_all_of_it(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = moments(FIRST_MOMENT, torch.Size(shape).numel()).view(shape)
    monkeypatch.setattr(codes, "PIECE", 512)
    held = encode_part(FIRST_MOMENT, values)
    whole = held.whole()
    assert torch.equal(whole.flatten(), again(FIRST_MOMENT, values.flatten()))
    for first in range(shape[0]):
        for count in range(1, min(4, shape[0] - first + 1)):
            assert torch.equal(held.rows(first, count), whole[first : first + count])
