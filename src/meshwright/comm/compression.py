"""How gradients are made smaller for their way between ranks, and what that sends. No torch.

    none         as they are
    fp16, bf16   summed in 16 bits
    int8         in 8 bits, each block of 256 with a scale of its own; summed in full on the rank that a part is of
    powersgd:R   each matrix as a product of two with R columns; what is left over is added to the next gradient
    topk:F       of each parameter the share F of numbers that are largest, with their places; the others are added to
                 the next gradient

What a rank sends is counted for rings, as the backends do it: an all-reduce sends 2 (n-1)/n of its size, an exchange of
everything with everyone (n-1)/n, a gather n-1 times what the rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

NONE = "none"
BLOCK = 256
"""Numbers that share a scale, in 8 bits."""
_SCALE_BYTES = 4
_LEAST_GAIN = 2
"""A matrix goes as a product only if that is at most this part of it."""


@dataclass(frozen=True)
class Compression:
    """A kind of compression, and its number: columns, or a share."""

    kind: str = NONE
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Of a strategy's `compress`."""
        kind, _, number = text.partition(":")
        return cls(kind, float(number or 0))

    @property
    def remembers(self) -> bool:
        """Whether a rank keeps what it did not send, to add it to the next gradient."""
        return self.kind in ("powersgd", "topk")

    @property
    def sums(self) -> bool:
        """Whether tensors are summed over ranks, which any all-reduce can do; others exchange codes or places."""
        return self.kind in (NONE, "fp16", "bf16", "powersgd")

    @property
    def columns(self) -> int:
        """Of the factors of a matrix."""
        return int(self.number)

    def kept(self, numbers: int) -> int:
        """How many of so many numbers are sent; at least one."""
        return min(numbers, max(1, ceil(numbers * self.number)))

    def factored(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of a parameter that goes as a product of two matrices; None where that saves too little."""
        if self.kind != "powersgd" or len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        small = min(rows, columns) > self.columns
        return (rows, columns) if small and (rows + columns) * self.columns * _LEAST_GAIN <= rows * columns else None

    def sent(self, shapes: Sequence[Sequence[int]], ranks: int, element: int = 4) -> int:
        """Bytes that each rank sends for the sum of parameters of these shapes, which travel together."""
        if ranks < 2:
            return 0
        numbers = sum(map(prod, shapes))
        match self.kind:
            case "topk":
                return (ranks - 1) * sum(self.kept(prod(shape)) for shape in shapes) * (element + 4)
            case "int8":
                padded = ceil(numbers / (BLOCK * ranks)) * BLOCK
                return 2 * (ranks - 1) * (padded + padded // BLOCK * _SCALE_BYTES)
            case "powersgd":
                pairs = [self.factored(shape) for shape in shapes]
                plain = sum(prod(shape) for shape, pair in zip(shapes, pairs, strict=True) if pair is None)
                left, right = (self.columns * sum(pair[side] for pair in pairs if pair) for side in (0, 1))
                return ring(plain + left, ranks, element) + ring(right, ranks, element)
            case "fp16" | "bf16":
                return ring(numbers, ranks, 2)
            case _:
                return ring(numbers, ranks, element)


def ring(numbers: int, ranks: int, element: int) -> int:
    """Bytes that a rank sends in an all-reduce."""
    return 2 * (ranks - 1) * numbers * element // ranks
