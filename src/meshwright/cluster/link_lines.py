"""Latency and bandwidth of collectives as `meshwright bench comm` measured them, in a calibration file. No torch.

A line holds for groups of one shape: so many ranks, of which so many share a machine, while all ranks of the machines
do the same. Its bandwidth is that of the bus, as nccl-tests counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from meshwright.comm.bandwidth import Line

_TEXTS = ("operation", "axis", "backend", "torch", "when")
_COUNTS = ("ranks", "inside", "node")


@dataclass(frozen=True)
class LinkLine:
    """One operation in groups of one shape: latency + bytes over the bus / bandwidth, perhaps with a bend."""

    operation: str
    axis: str
    """Of a strategy, or made of several of them; or the world, where it was over all ranks."""
    ranks: int
    """Of a group."""
    inside: int
    """How many of them share a machine."""
    node: int
    """Ranks of a machine, all of them at work at the same time."""
    backend: str
    latency_s: float
    bandwidth: float
    """Bytes per second."""
    torch: str
    when: str
    bend: float | None = None
    """From how many bytes over the bus another bandwidth holds."""
    beyond: float | None = None
    """That bandwidth."""

    @property
    def line(self) -> Line:
        """Its times."""
        return Line(self.latency_s, self.bandwidth, self.bend, self.beyond)

    def slower(self, times: float) -> LinkLine:
        """The same over a link that is that many times as slow."""
        beyond = None if self.beyond is None else self.beyond / times
        return replace(self, bandwidth=self.bandwidth / times, beyond=beyond)

    @property
    def key(self) -> tuple[str, str, int, int, int, str]:
        """What it is about: a newer line of the same key takes its place."""
        return self.operation, self.axis, self.ranks, self.inside, self.node, self.backend


def read_lines(rows: Iterable[Mapping[str, Any]]) -> tuple[LinkLine, ...]:
    """Lines of a file; what is no measurement is a ValueError."""
    return tuple(_read(row) for row in rows)


def _read(row: Mapping[str, Any]) -> LinkLine:
    # Files from before bends were found say nothing of one.
    row = {"bend": None, "beyond": None, **row}
    names = {one.name for one in fields(LinkLine)}
    if row.keys() != names:
        raise ValueError(f"keys of a line differ: {', '.join(sorted(names ^ row.keys()))}")
    if row["bend"] is None and row["beyond"] is None:
        names -= {"bend", "beyond"}
    for name in _TEXTS:
        if not isinstance(row[name], str):
            raise ValueError(f"{row[name]!r} is no {name}")
    for name in names - {*_TEXTS}:
        value = row[name]
        kinds = int if name in _COUNTS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not isfinite(value) or value < 0:
            raise ValueError(f"{value!r} is no {name}")
    rates = [row["bandwidth"], *([] if row["beyond"] is None else [row["beyond"]])]
    if not 1 <= row["inside"] <= row["ranks"] or row["ranks"] < 2 or min(rates) <= 0:
        raise ValueError(f"a line of {row['ranks']} ranks, {row['inside']} in a machine, {row['bandwidth']} bytes/s")
    return LinkLine(**row)


def with_newer(lines: Iterable[LinkLine], newer: Iterable[LinkLine]) -> tuple[LinkLine, ...]:
    """All of them; of one key the newer one."""
    found = {line.key: line for line in (*lines, *newer)}
    return tuple(found[key] for key in sorted(found))
