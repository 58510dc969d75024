"""Which steps are profiled on demand: observe.profile_steps, such as 10:12. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parse_steps(text: str) -> range:
    """Steps from FIRST:LAST, both included, or of one STEP."""
    first, colon, last = text.partition(":")
    last = last if colon else first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"'{text}' is not FIRST:LAST, such as 10:12 for steps 10, 11 and 12")
    return range(int(first), int(last) + 1)


def on_demand(setting: str | None) -> range:
    """The steps that are profiled on demand: whoever else would profile them gives way, since one can at a time."""
    return parse_steps(setting) if setting is not None else range(0)


def is_usual(line: Mapping[str, Any]) -> bool:
    """Whether a step that a rank has recorded took what others take: profilers slow down what they watch."""
    return not line.get("profiled") and not line.get("on_demand")


def step_mark(step: int) -> str:
    """What a step is called in a trace."""
    return f"step {step}"
