"""Families of strategies that people compare. No torch."""

from __future__ import annotations

from meshwright.planning.constraints import Constraint
from meshwright.strategy import Strategy


def families() -> dict[str, tuple[Constraint, ...]]:
    """Families of strategies that people compare, as constraints."""

    def single(*axes: str) -> list[Constraint]:
        return [Constraint(axis, "=", 1) for axis in axes]

    return {
        "copies of the model": (Constraint("zero", "=", 0), *single("tp", "pp", "cp")),
        "sharded state (ZeRO, FSDP)": (Constraint("zero", ">=", 1), *single("tp", "pp", "cp")),
        "tensor parallel": (Constraint("tp", ">", 1), *single("pp")),
        "pipeline": (Constraint("pp", ">", 1), *single("tp")),
        "tensor + pipeline": (Constraint("tp", ">", 1), Constraint("pp", ">", 1)),
    }


def family_of(strategy: Strategy) -> str:
    """The family that a strategy belongs to."""
    if strategy.tp > 1:
        return "tensor + pipeline" if strategy.pp > 1 else "tensor parallel"
    if strategy.pp > 1:
        return "pipeline"
    return "sharded state (ZeRO, FSDP)" if strategy.zero else "copies of the model"
