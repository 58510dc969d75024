"""Cells of a table of published training runs as numbers, or why they are none."""

from __future__ import annotations

MOST_RANKS = 1_000_000
MOST = {"global_batch": 10_000_000, "seq_len": 100_000_000}
"""Above these, numbers are no training run's."""


class Skip(Exception):
    """A row that cannot be estimated, and why."""


def number_of(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None


def whole(row: dict[str, str], name: str, assumed: list[str] | None = None, otherwise: int | None = None) -> int:
    value = number_of(row.get(name, ""))
    if value is None and otherwise is not None:
        if assumed is not None:
            assumed.append(f"{name}={otherwise}")
        return otherwise
    if value is None or value != int(value):
        raise Skip(f"{name} is {'not given' if not row.get(name) else repr(row[name])}")
    if value > MOST.get(name, MOST_RANKS):
        raise Skip(f"{name}={value:.0f} is impossible")
    return int(value)
