"""Rounding up or down at random, so that the mean is the value: a sum of many small changes is then not lost.

The random bits are a function of (key, step, index of the element in the whole parameter): whoever holds a part of a
parameter rounds it as one device would round the whole. There are 32 bits an element and step, from a mix of 32-bit
words that the GPU's kernel repeats bit for bit (`kernel.py`): the low half is for weights, the high half for first
moments, and one more round gives those for second moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Multipliers of two well-known mixes of 32-bit words, and the golden ratio; as signed numbers, since tensors are.
FIRST, SECOND, THIRD, GOLDEN = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32), 0x9E3779B9 - (1 << 32)


@dataclass(frozen=True)
class Place:
    """Where the elements of a part lie in the whole parameter, and the key of its random bits.

    Element i of the part is element `base + i` of the whole; where the part is cut out of rows, the element
    `base + i // run * stride + i % run`.
    """

    key: int
    base: int = 0
    run: int = 0
    stride: int = 0

    @staticmethod
    def of(key: int, offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Place:
        """The place of a part of that shape, which begins at `offset` of the whole."""
        strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
        base = sum(first * stride for first, stride in zip(offset, strides, strict=True))
        cut = [dim for dim in range(1, len(whole)) if shape[dim] != whole[dim]]
        if not cut:
            return Place(key, base)
        if len(cut) > 1:
            raise ValueError(f"a part {list(shape)} of {list(whole)} is cut in several dimensions beside the first")
        (dim,) = cut
        return Place(key, base, shape[dim] * strides[dim], whole[dim] * strides[dim])

    @property
    def words(self) -> tuple[int, int]:
        """The key's two halves as signed 32-bit numbers."""
        return _signed(self.key), _signed(self.key >> 32)

    def index(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Which elements of the whole some of the part are, as int64."""
        index = torch.arange(start, stop, device=device)
        if self.run:
            index = index // self.run * self.stride + index % self.run
        return index + self.base


def random_bits(place: Place, step: Tensor, start: int, stop: int) -> Tensor:
    """32 random bits of each of some elements of a part, as int32; `step` is a count in a tensor of one element."""
    low, high = place.words
    # Two words that differ from step to step. A shift of one sequence would be the same numbers at other places.
    first = mix(mix(step.to(torch.int32).reshape(()) * GOLDEN + low) + high)
    second = mix(first + GOLDEN)
    index = place.index(start, stop, step.device)
    x = index.to(torch.int32) ^ (first ^ ((index >> 32).to(torch.int32) * GOLDEN))
    x = (x ^ _shift(x, 16)) * FIRST
    x = ((x ^ _shift(x, 15)) + second) * SECOND
    return x ^ _shift(x, 16)


def more_bits(bits: Tensor) -> Tensor:
    """16 further random bits, from 32."""
    x = bits * THIRD
    return _shift(x ^ _shift(x, 15), 16)


def high_half(bits: Tensor) -> Tensor:
    """The upper 16 bits."""
    return _shift(bits, 16)


def mix(x: Tensor) -> Tensor:
    """A permutation of the 32-bit words without a visible pattern."""
    x = (x ^ _shift(x, 16)) * FIRST
    x = (x ^ _shift(x, 15)) * SECOND
    return x ^ _shift(x, 16)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Float32 as bfloat16, up or down by 16 random bits; what bfloat16 has stays as it is."""
    raised = (values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000
    # The bits of a NaN could carry over into the sign.
    return torch.where(values.isnan(), values, raised.view(torch.float32)).to(torch.bfloat16)


def _shift(x: Tensor, by: int) -> Tensor:
    # `>>` of int32 copies the sign bit; the mask takes the copies away.
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
