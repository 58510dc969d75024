"""What becomes of a foreign key, as data: a table of rules is both what reads a file and what the guide prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.interop.translation import Reading

Act = Callable[[Reading, str, Any], None]
Kind = Literal["bool", "int", "number", "text", "list", "any"]
FARTHEST = sys.float_info.max
MOST = 1 << 63


@dataclass(frozen=True)
class Rule:
    """One foreign key."""

    key: str
    kind: Kind
    ours: str
    """What the guide says of it: our setting, or that it does not apply or is refused, and why."""
    act: Act
    """What it does; it is given the reading, the key and a value of the right kind."""


def to(key: str, kind: Kind, setting: str, note: str = "") -> Rule:
    """The setting is the same thing under another name."""

    def act(reading: Reading, name: str, value: Any) -> None:
        reading.map(name, value, setting, value, note)

    return Rule(key, kind, f"`{setting}`" + (f"; {note}" if note else ""), act)


def leave(key: str, kind: Kind, reason: str) -> Rule:
    """The key does not apply here, whatever its value."""

    def act(reading: Reading, name: str, value: Any) -> None:
        reading.leave(name, value, reason)

    return Rule(key, kind, f"not applicable: {reason}", act)


def only(key: str, kind: Kind, allowed: Iterable[Any], here: str, otherwise: str) -> Rule:
    """Some values are what happens here anyway; others are refused."""
    values = tuple(allowed)

    def act(reading: Reading, name: str, value: Any) -> None:
        if value in values:
            reading.leave(name, value, here)
        else:
            reading.refuse(name, f"= {value!r} is refused: {otherwise}")

    words = " or ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    return Rule(key, kind, f"{words}: {here}; otherwise refused: {otherwise}", act)


def refused(key: str, reason: str) -> Rule:
    """The key is known, and what it asks for is not done."""

    def act(reading: Reading, name: str, value: Any) -> None:
        reading.refuse(name, f"is refused: {reason}")

    return Rule(key, "any", f"refused: {reason}", act)


def does(key: str, kind: Kind, ours: str, act: Act) -> Rule:
    """The key has a rule of its own."""
    return Rule(key, kind, ours, act)


def later(key: str, kind: Kind, ours: str) -> Rule:
    """The key is read together with others when all are known."""
    return Rule(key, kind, ours, lambda reading, name, value: None)


def fitting(kind: Kind, value: Any) -> Any:
    """A value of that kind, or a ValueError that says what is needed."""
    if kind in ("any", "list"):
        return value
    if kind == "bool":
        if isinstance(value, bool):
            return value
        raise ValueError("must be true or false")
    if kind == "text":
        if isinstance(value, str):
            return value
        raise ValueError("must be a text")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    # 1e400 is an infinite number, in JSON as in a shell; NaN is not between anything.
    if not -FARTHEST <= value <= FARTHEST:
        raise ValueError("must be a finite number")
    if kind == "int":
        # JSON's 5e8 is a floating-point number.
        if value != int(value):
            raise ValueError("must be a whole number")
        if abs(value) >= MOST:
            raise ValueError("must be a whole number of 64 bits")
        return int(value)
    return float(value)
