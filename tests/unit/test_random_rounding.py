"""Rounding at random: right on average, exact where nothing is to be rounded, and the same however a tensor is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.optim.random_rounding import Place, high_half, more_bits, random_bits, round_to_bf16

STEPS = 2000
Rounding = Callable[[Tensor, Tensor], Tensor]


def drift(rounding: Rounding, values: Tensor) -> float:
    """How many standard errors the mean of many roundings is away from the values, at most."""
    total = torch.zeros(len(values), dtype=torch.float64)
    squares = torch.zeros_like(total)
    for step in range(STEPS):
        bits = random_bits(Place(99), torch.tensor(float(step)), 0, len(values))
        error = rounding(values, bits).double() - values.double()
        total += error
        squares += error.square()
    deviation = (squares / STEPS - (total / STEPS).square()).clamp(min=1e-60).sqrt()
    # Of all values together, so that a small bias of each is seen.
    return float((total / deviation).sum().abs() / (len(values) * STEPS) ** 0.5)


VALUES = torch.randn(256, generator=torch.Generator().manual_seed(1)).abs() * 10
# Of one sign: what is biased towards zero or away from it adds up.


def test_rounding_is_right_on_average() -> None:
    assert drift(round_to_bf16, VALUES) < 4


@pytest.mark.parametrize(
    "faulty",
    [
        lambda values, bits: round_to_bf16(values, bits & 0x7FFF),
        lambda values, bits: round_to_bf16(values, ((bits & 0xFFFF) + 400).clamp(max=0xFFFF)),
        lambda values, bits: round_to_bf16(values, bits & 0xF000),
    ],
    ids=["too seldom up", "a little too often up", "few bits"],
)
def test_a_bias_would_be_seen(faulty: Rounding) -> None:
    assert drift(faulty, VALUES) > 6


def test_what_bfloat16_has_stays_as_it_is() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[~patterns.isnan()]
    bits = random_bits(Place(3), torch.tensor(1.0), 0, len(patterns)) | 0xFF00
    rounded = round_to_bf16(patterns.float(), bits)
    assert torch.equal(rounded.view(torch.int16), patterns.view(torch.int16))


def test_no_number_stays_no_number_whatever_its_bits() -> None:
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x400000], dtype=torch.int32)
    assert round_to_bf16(patterns.view(torch.float32), torch.full((5,), 0xFFFF, dtype=torch.int32)).isnan().all()


WHOLE = (6, 10, 8)
BOXES = [
    ((0, 0, 0), (6, 10, 8)),
    ((2, 0, 0), (3, 10, 8)),
    ((0, 4, 0), (6, 5, 8)),
    ((0, 0, 3), (6, 10, 5)),
    ((4, 0, 2), (2, 10, 4)),
    ((1, 7, 0), (4, 3, 8)),
    ((5, 0, 7), (1, 10, 1)),
]


@pytest.mark.parametrize(("offset", "shape"), BOXES)
def test_a_part_has_the_bits_of_its_place_in_the_whole(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    step = torch.tensor(7.0)
    whole = random_bits(Place(5), step, 0, 480).view(WHOLE)
    place = Place.of(5, offset, shape, WHOLE)
    count = torch.Size(shape).numel()
    cut = whole[tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))]
    assert torch.equal(random_bits(place, step, 0, count).view(shape), cut)
    assert torch.equal(random_bits(place, step, count // 2, count), cut.flatten()[count // 2 :])


def test_parts_that_are_cut_twice_within_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cut in several dimensions"):
        Place.of(5, (0, 0, 0), (6, 5, 4), WHOLE)


def test_bits_of_places_beyond_32_bits_are_their_own() -> None:
    step = torch.tensor(1.0)
    near, far = (random_bits(Place(5, base=base), step, 0, 1000) for base in (0, 1 << 32))
    across = random_bits(Place(5, base=(1 << 32) - 500), step, 0, 1000)
    assert float((near == far).float().mean()) < 0.01
    assert torch.equal(across[500:], far[:500])


def test_bits_are_even_and_steps_keys_neighbours_and_uses_have_nothing_in_common() -> None:
    def bits(key: int, step: int) -> Tensor:
        return random_bits(Place(key), torch.tensor(float(step)), 0, 1 << 16)

    one = bits(1, 1)
    others = [
        one.roll(1),
        one.roll(256),
        bits(1, 2),
        bits(2, 1),
        bits(1 + (1 << 32), 1),
        high_half(one),
        more_bits(one),
    ]
    # The mean of 2^16 even signs deviates by 2^-8; here are 256 pairs of bits each.
    assert float(signs(one, 32).mean(dim=1).abs().max()) < 5 * 2.0**-8
    for other in others:
        assert float((signs(one, 16) @ signs(other, 16).T).abs().max()) / (1 << 16) < 5 * 2.0**-8


def signs(words: Tensor, bits: int) -> Tensor:
    return torch.stack([((words >> bit) & 1) * 2.0 - 1 for bit in range(bits)])
