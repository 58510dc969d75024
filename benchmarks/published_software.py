"""What the software of a published training run does by itself, where its row does not say otherwise."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from published_words import number_of

HERE = Path(__file__).parent
NARROW = {"parameter": 2, "gradient": 2, "optimizer": 4}
"""Bytes of states that are all kept in 16 bits."""


@dataclass(frozen=True)
class Habits:
    """One kind of software; `data/software.toml` says what the fields mean."""

    word: str
    family: str
    memory: str = "allocated"
    flash: bool = True
    sequence_parallel: bool = False
    bytes: dict[str, int] = field(default_factory=dict)
    bf16_bytes: dict[str, int] = field(default_factory=dict)
    pure_bytes: dict[str, int] = field(default_factory=lambda: dict(NARROW))
    why: str = ""

    def stored(self, precision: str, notes: str) -> dict[str, Any]:
        """Bytes that differ from the family's: of a parameter, its gradient, its optimizer state, a logit."""
        found = dict(self.bytes)
        if "8-bit" in notes or "8bit" in notes:
            found |= {**NARROW, "optimizer": 2}
        elif "optimizer-in-backward" in notes:
            found |= {**NARROW, "gradient": 0}
        elif "pure" in precision:
            found |= self.pure_bytes
        elif "fp32 grad" in precision:
            found |= {"gradient": 6, "optimizer": 12}
        elif precision.startswith("bf16"):
            found |= self.bf16_bytes
        return {f"{name}_bytes": count for name, count in found.items()}

    def memory_of(self, peak: str, notes: str) -> tuple[float | None, str]:
        """Peak memory in GiB, and what was measured: allocated, reserved, or all that the device has given out."""
        value = number_of(peak)
        if value is None:
            return None, ""
        if "nvidia-smi" in notes:
            return value, "device"
        if "reserved" in notes and "allocated" not in notes:
            return value, "reserved"
        if "allocated" in notes:
            return (value if "gib" in notes else value * 1e9 / 2**30), "allocated"
        return value, self.memory


@cache
def _known() -> tuple[Habits, ...]:
    table = tomllib.loads((HERE / "data/software.toml").read_text(encoding="utf-8"))
    return tuple(Habits(**entry) for entry in table["software"])


def habits_of(row: dict[str, str], assumed: list[str]) -> Habits:
    """The software of a row; one that is not known has the habits of those that train alike."""
    framework = row.get("framework", "").lower()
    found = next((each for each in _known() if each.word in framework), None)
    if found is not None:
        return found
    # Whole matrices and sharded state, or split ones.
    split = any(number_of(row.get(axis, "")) not in (None, 1.0) for axis in ("tp", "pp"))
    family = "megatron" if split else "fsdp"
    assumed.append(f"as fast as {family}")
    return Habits(framework, family, sequence_parallel=split)
