"""Constraints of a plan, as people type them: `tp<=8`, `zero=3`, `pp=1`, `micro_batch>=2`, `recompute=none`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ConfigError, UserError, nearest
from meshwright.known_names import in_our_words
from meshwright.strategy import CHOICES, check_choice

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
    for word in in_our_words(" ".join(texts).replace(",", " "))[0].split():
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
            _check_word(word, key, value)
            found.append(Constraint(key, sign, value))
        elif key == "compress":
            raise UserError(
                f"constraint '{word}': compression changes what is computed, so no plan chooses it by itself; it goes "
                f"with data parallel alone, so name the strategy: 'dp=N compress={value}'"
            )
        else:
            known = NUMBERS + WORDS
            raise UserError(f"constraint '{word}': unknown key '{key}'{nearest(key, known)}; known: {', '.join(known)}")
    _check_together(found)
    return tuple(found)


def _check_word(word: str, key: str, value: str) -> None:
    """Raise a UserError unless a strategy can have that word, or the part of it before a number."""
    choices = CHOICES.get(key, ("on", "off"))
    if value in {choice.partition(":")[0] for choice in choices if choice != "N+N"}:
        return
    try:
        if key in CHOICES:
            check_choice(key, value, choices)
            return
    except ConfigError:
        pass
    raise UserError(
        f"constraint '{word}': unknown word '{value}'{nearest(value, choices)}; known: {', '.join(choices)}"
    )


def not_searched(constraints: Iterable[Constraint]) -> str | None:
    """Which of them asks for what strategies can have and no search looks at."""
    for one in constraints:
        if one.sign != "=":
            continue
        kind, _, count = str(one.value).partition(":")
        reason = {
            ("schedule", "gpipe"): "1f1b takes as long and holds less",
            ("layers", "balanced"): "the search has its own splits, as N+N",
        }.get((one.key, kind))
        if one.key == "layers" and "+" in kind:
            reason = "even stages are, and fewer layers where the head is"
        if one.key == "schedule" and kind == "interleaved" and count not in ("", "2", "4", "8"):
            reason = "of interleaved those with 2, 4 and 8 stages a rank are"
        if one.key == "recompute" and kind == "first" and count:
            reason = "recompute=first stands for the least N that fits"
        if one.key == "recompute" and kind == "budget":
            reason = "none, selective, first and full are"
        if one.key == "cp_method" and count:
            reason = "ring and ulysses are"
        if one.key == "cp" and isinstance(one.value, int) and one.value & (one.value - 1):
            reason = "powers of two are"
        if reason is not None:
            return f"constraint {one} is not searched: {reason}; estimate it with --strategy, or drop it"
    return None


def _check_together(constraints: list[Constraint]) -> None:
    """Raise a UserError where two of them leave nothing."""
    for key in {one.key for one in constraints}:
        own = [one for one in constraints if one.key == key]
        if key in NUMBERS:
            numbers = range(4) if key == "zero" else range(1, 100_001)
            if not any(all(one.holds({key: number}) for one in own) for number in numbers):
                if len(own) == 1:
                    which = "0, 1, 2 or 3" if key == "zero" else "a whole number from 1"
                    raise UserError(f"constraint {own[0]} leaves nothing: {key} is {which}")
                raise UserError(f"constraints contradict each other: {', '.join(map(str, own))}")
        else:
            wanted = {one.value for one in own if one.sign == "="}
            unwanted = {one.value for one in own if one.sign == "!="}
            if len(wanted) > 1 or wanted & unwanted:
                raise UserError(f"constraints contradict each other: {', '.join(map(str, own))}")
