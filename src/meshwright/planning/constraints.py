"""Constraints of a plan, as people type them: `tp<=8`, `zero=3`, `pp=1`, `micro_batch>=2`, `recompute=none`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError, nearest

NUMBERS = ("dp", "replicate", "shard", "tp", "pp", "cp", "ep", "zero", "micro_batch")
WORDS = ("schedule", "layers", "cp_method", "recompute", "offload", "sp", "shares")
_TEST: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


@dataclass(frozen=True)
class Constraint:
    """One of them."""

    key: str
    sign: str
    value: int | str

    def holds(self, found: Mapping[str, Any]) -> bool:
        """Whether a choice meets it; what the choice does not say is no matter yet."""
        if self.key not in found:
            return True
        have = found[self.key]
        if isinstance(self.value, str):
            # recompute=first stands for first:N with any N.
            same = have == self.value or str(have).partition(":")[0] == self.value
            return same == (self.sign == "=")
        return _TEST[self.sign](have, self.value)

    def __str__(self) -> str:
        return f"{self.key}{self.sign}{self.value}"


def parse_constraints(texts: Iterable[str]) -> tuple[Constraint, ...]:
    """Constraints of several texts, each with one or more words."""
    found: list[Constraint] = []
    for word in " ".join(texts).replace(",", " ").split():
        match = re.fullmatch(r"([a-z_]+)(<=|>=|!=|=|<|>)(.+)", word)
        if match is None:
            raise UserError(
                f"constraint '{word}' is not KEY=VALUE, KEY<=NUMBER or KEY>=NUMBER, such as tp<=8 or zero=3"
            )
        key, sign, value = match.groups()
        if key in NUMBERS:
            if not value.isdecimal():
                raise UserError(f"constraint '{word}': {key} needs a whole number")
            found.append(Constraint(key, sign, int(value)))
        elif key in WORDS:
            if sign not in ("=", "!="):
                raise UserError(f"constraint '{word}': {key} is a word; use {key}=... or {key}!=...")
            found.append(Constraint(key, sign, value))
        else:
            known = NUMBERS + WORDS
            raise UserError(f"constraint '{word}': unknown key '{key}'{nearest(key, known)}; known: {', '.join(known)}")
    _check_together(found)
    return tuple(found)


def _check_together(constraints: list[Constraint]) -> None:
    """Raise a UserError where two of them leave nothing."""
    for key in {one.key for one in constraints}:
        own = [one for one in constraints if one.key == key]
        if key in NUMBERS:
            numbers = range(4) if key == "zero" else range(1, 100_001)
            if not any(all(one.holds({key: number}) for one in own) for number in numbers):
                raise UserError(f"constraints contradict each other: {', '.join(map(str, own))}")
        else:
            wanted = {one.value for one in own if one.sign == "="}
            unwanted = {one.value for one in own if one.sign == "!="}
            if len(wanted) > 1 or wanted & unwanted:
                raise UserError(f"constraints contradict each other: {', '.join(map(str, own))}")
