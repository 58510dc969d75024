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
from typing import NamedTuple

NONE = "none"
BLOCK = 256
"""Numbers that share a scale, in 8 bits."""
_SCALE_BYTES = 4
_LEAST_GAIN = 2
"""A matrix goes as a product only if that is at most this part of it."""


class Message(NamedTuple):
    """A collective that carries what is left of gradients."""

    operation: str
    """all_reduce, all_gather or all_to_all."""
    size: int
    """Bytes of the whole tensor: of a gather what each rank gets in the end, of an exchange what each gives."""

    def sent(self, ranks: int) -> int:
        """Bytes that a rank sends for it."""
        return (2 if self.operation == "all_reduce" else 1) * (ranks - 1) * self.size // ranks


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

    def messages(self, shapes: Sequence[Sequence[int]], ranks: int, element: int = 4) -> list[Message]:
        """What carries the sum of parameters of these shapes, which travel together."""
        if ranks < 2:
            return []
        numbers = sum(map(prod, shapes))
        match self.kind:
            case "topk":
                kept = sum(self.kept(prod(shape)) for shape in shapes)
                return [Message("all_gather", ranks * kept * (element + 4))]
            case "int8":
                # Everyone's part of everyone, then the sums of all parts.
                size = self._codes(numbers, ranks)
                return [Message("all_to_all", size), Message("all_gather", size)]
            case "powersgd":
                plain, left, right = self._sides(shapes)
                sizes = ((plain + left) * element, right * element)
                return [Message("all_reduce", size) for size in sizes if size]
            case "fp16" | "bf16":
                return [Message("all_reduce", 2 * numbers)]
            case _:
                return [Message("all_reduce", element * numbers)]

    def sent(self, shapes: Sequence[Sequence[int]], ranks: int, element: int = 4) -> int:
        """Bytes that each rank sends for the sum of parameters of these shapes, which travel together."""
        return sum(one.sent(ranks) for one in self.messages(shapes, ranks, element))

    def in_vain(self, shapes: Sequence[Sequence[int]], ranks: int, element: int = 4) -> str | None:
        """That it sends as much as gradients are, or more, and what would send less; None where it saves something."""
        whole = ring(sum(map(prod, shapes)), ranks, element)
        sent = self.sent(shapes, ranks, element)
        if self.kind == NONE or sent < whole or not whole:
            return None
        # Values and their places, of which every rank gets those of all others.
        most = 2 * element / (ranks * (element + 4))
        instead = {"topk": f"a share below {most:.2g}", "powersgd": "fewer columns"}.get(self.kind, "another kind")
        named = f"{self.kind}:{self.number:.10g}" if self.number else self.kind
        share = f"{sent / whole:.0%} of what gradients are uncompressed"
        return f"compress={named} sends {share} on {ranks} ranks: use {instead}, or none"

    def working(self, shapes: Sequence[Sequence[int]], ranks: int, element: int = 4) -> int:
        """Bytes that a rank needs at the fullest moment of such a sum, beside the gradients and what it remembers."""
        numbers = sum(map(prod, shapes))
        match self.kind:
            case "topk":
                # The gradients with what was not sent, beside that their sums, or how large those of one parameter are
                # and which may be among the largest; of those that go places, values, both in one message, the messages
                # of all ranks, and one of these as it is added.
                kept = sum(self.kept(prod(shape)) for shape in shapes)
                going = (8 + 8 + element) + (1 + ranks) * (element + 4) + (8 + element)
                search = (element + 2) * max(map(prod, shapes), default=0)
                return element * numbers + max(element * numbers + kept * going, search)
            case "int8":
                # Wide rows and their codes, and these once more without their scales, or the sum of the rows.
                padded = ceil(numbers / (BLOCK * ranks)) * BLOCK * ranks
                scales = padded // BLOCK * _SCALE_BYTES
                return 4 * padded + self._codes(numbers, ranks) + max(padded + 2 * scales, 4 * padded // ranks)
            case "powersgd":
                # Matrices with what was not sent; of the largest, a product and a choice; both sides; what goes whole.
                plain, left, right = self._sides(shapes)
                matrices = [prod(shape) for shape in shapes if self.factored(shape)]
                return element * (sum(matrices) + 2 * max(matrices, default=0) + plain + 2 * left + 2 * right)
            case "fp16" | "bf16":
                return 2 * numbers
            case _:
                return 0

    def _codes(self, numbers: int, ranks: int) -> int:
        """Bytes of so many numbers in 8 bits, with their scales, in equal parts for all ranks."""
        return ranks * ceil(numbers / (BLOCK * ranks)) * (BLOCK + _SCALE_BYTES)

    def _sides(self, shapes: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Numbers that go whole, and those of the left and the right factors of matrices."""
        pairs = [self.factored(shape) for shape in shapes]
        plain = sum(prod(shape) for shape, pair in zip(shapes, pairs, strict=True) if pair is None)
        left, right = (self.columns * sum(pair[side] for pair in pairs if pair) for side in (0, 1))
        return plain, left, right


def ring(numbers: int, ranks: int, element: int) -> int:
    """Bytes that a rank sends in an all-reduce."""
    return 2 * (ranks - 1) * numbers * element // ranks
