"""How a run keeps weights, gradients and AdamW's moments, in bytes; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.errors import UserError

STORED = {"float32": 4, "bf16": 2}
MOMENTS = {"float32": 4, "bf16": 2, "int8": 1}
BLOCK = 256
"""Elements of moments in 8 bits that share a scale of float32; a test holds it against the optimizer's."""


@dataclass(frozen=True)
class Kept:
    """The settings precision.stored and precision.moments."""

    stored: str = "float32"
    moments: str = "float32"

    @staticmethod
    def of(stored: str | None, moments: str | None) -> Kept:
        """What a user gave; None is float32."""
        for name, given, known in (("stored", stored, STORED), ("moments", moments, MOMENTS)):
            if given is not None and given not in known:
                raise UserError(f"--{name}={given} is not known; use {', '.join(known)}")
        return Kept(stored or "float32", moments or "float32")

    @property
    def element(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return STORED[self.stored]

    @property
    def both_moments(self) -> float:
        """Bytes of both moments of a parameter."""
        scales = 4 / BLOCK if self.moments == "int8" else 0.0
        return 2 * (MOMENTS[self.moments] + scales)

    @property
    def updated(self) -> float:
        """Bytes that an update reads and writes for a parameter."""
        return 3 * self.element + 2 * self.both_moments

    def moments_of(self, parts: Iterable[int]) -> int:
        """Bytes of both moments of parts of so many elements each."""
        scales = 4 if self.moments == "int8" else 0
        return sum(2 * (count * MOMENTS[self.moments] + -(-count // BLOCK) * scales) for count in parts)

    def __str__(self) -> str:
        """As settings of a run; empty where they are the usual ones."""
        given = {"stored": self.stored, "moments": self.moments}
        return " ".join(f"precision.{name}={value}" for name, value in given.items() if value != "float32")


FLOAT32 = Kept()
"""What a run keeps unless it is told otherwise."""
