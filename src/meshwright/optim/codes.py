"""Moments in 8 bits: small floating-point numbers, relative to the largest of their block.

A block is a run of 256 elements of a part. Its scale is the largest magnitude in it, in float32, and each element x is
kept as a code for |x| / scale, which is at most one:

- first moments: sign, 4 bits of exponent, 3 of mantissa: from 1 to 2^-14 in steps of 1/8 of a power of two, and on to
  zero in steps of 2^-17;
- second moments: 5 bits of exponent, 3 of mantissa: from 1 to 2^-30, and on to zero in steps of 2^-33. What is not zero
  gets no code of zero: an update divides by its root.

The largest element is kept exactly, and codes of decoded values are the same codes: what is saved in float32 and loaded
again is the same state. Blocks of nothing but (nearly) zeros are zeros. A block with something that is no number has an
infinite scale. `kernel.py` does the same on a GPU, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
"""Elements that share a scale."""
SMALLEST_SCALE = 2.0**-100
"""Blocks whose largest value is below it are zeros."""
PIECE = 1 << 18
"""Elements that are worked on at a time, so that intermediates stay small; blocks do not cross its multiples."""
MANTISSA = 3
"""Bits of mantissa of both codes."""


@dataclass(frozen=True)
class Code:
    """How a kind of moment is kept in 8 bits."""

    signed: bool
    exponents: int
    """The exponent field of one; that of the smallest normal number is one."""

    @property
    def smallest_normal(self) -> float:
        """Below it steps are all alike."""
        return 2.0 ** (1 - self.exponents)

    @property
    def steps(self) -> float:
        """How many of the smallest steps make up one."""
        return 2.0 ** (self.exponents - 1 + MANTISSA)


FIRST_MOMENT, SECOND_MOMENT = Code(True, 15), Code(False, 31)
_DROPPED = 23 - MANTISSA
_HALF = 1 << 15


def blocks_of(elements: int) -> int:
    """How many blocks that many elements make up; the last may be short."""
    return -(-elements // BLOCK)


def encode(code: Code, values: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales of a run of float32 values; rounded by 16 random bits each, or else to the nearest."""
    count = len(values)
    padded = functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    size = torch.where(padded.isnan(), torch.inf, padded.abs())
    scales = size.amax(dim=1)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)[:, None]
    y = torch.where(size >= scales[:, None], (scales > 0).float()[:, None], size * inverse).view(-1)[:count]
    # 16 random bits above those that the mantissa loses; a half stands for the rest, which is below 2^-16 of a step.
    drawn = torch.full_like(y, _HALF, dtype=torch.int32) if bits is None else bits
    lowest = 0 if bits is None else 1 << (_DROPPED - 17)
    raised = y.view(torch.int32) + ((drawn << (_DROPPED - 16)) + lowest)
    normal = (raised >> _DROPPED) - ((127 - code.exponents) << MANTISSA)
    small = (y * code.steps + drawn.float() * 2.0**-16).to(torch.int32)
    found = torch.where(y < code.smallest_normal, small, normal)
    if code.signed:
        found = found | ((values < 0).to(torch.int32) << 7)
    else:
        found = torch.where((values > 0) & (y > 0), found.clamp(min=1), found)
    return found.to(torch.uint8), scales


def decode(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of a run of codes that begins with a block."""
    magnitude = codes.to(torch.int32)
    if code.signed:
        magnitude = magnitude & 0x7F
    normal = ((magnitude << _DROPPED) + ((127 - code.exponents) << 23)).view(torch.float32)
    y = torch.where(magnitude < 1 << MANTISSA, magnitude.float() * (1 / code.steps), normal)
    if code.signed:
        y = torch.where(codes >= 0x80, -y, y)
    return y * scales.repeat_interleave(BLOCK)[: len(codes)]


@dataclass(frozen=True)
class Coded:
    """A part of a moment that is kept in 8 bits: codes of the part's shape, and the scales of its blocks."""

    code: Code
    codes: Tensor
    scales: Tensor

    def rows(self, first: int, count: int) -> Tensor:
        """Some rows of the part, in float32."""
        shape = self.codes.shape[1:]
        width = shape.numel()
        return self._run(first * width, (first + count) * width).view(count, *shape)

    def whole(self) -> Tensor:
        """All of the part, in float32."""
        return self._run(0, self.codes.numel()).view(self.codes.shape)

    def _run(self, start: int, stop: int) -> Tensor:
        # Blocks go through the whole part, whatever its rows.
        block = start // BLOCK
        codes = self.codes.reshape(-1)[block * BLOCK : stop]
        return decode(self.code, codes, self.scales[block : blocks_of(stop)])[start - block * BLOCK :]


@torch.no_grad()
def encode_part(code: Code, values: Tensor) -> Coded:
    """A part of a moment in 8 bits, rounded to the nearest; takes little memory beside what it gives."""
    codes = torch.empty_like(values, dtype=torch.uint8)
    scales = torch.empty(blocks_of(values.numel()), dtype=torch.float32, device=values.device)
    into, flat = codes.view(-1), values.reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE].float()
        first = start // BLOCK
        into[start : start + PIECE], scales[first : first + blocks_of(len(piece))] = encode(code, piece)
    return Coded(code, codes, scales)
