"""What is drawn of measured collectives: bandwidths and times by size, and the line through them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from meshwright.bench.comm_rows import Row
from meshwright.comm.bandwidth import Line, bus_factor
from meshwright.comm.fitted_line import fit_bent


@dataclass(frozen=True)
class Series:
    """One operation on one axis, or one algorithm: points of (bytes, seconds)."""

    name: str
    points: tuple[tuple[float, float], ...]
    factor: float
    """What a link carries of the bytes."""

    @property
    def line(self) -> Line | None:
        """Through all points; None with fewer than two."""
        return fit_bent([(size * self.factor, seconds) for size, seconds in self.points])

    def bus_gb_s(self, size: float, seconds: float) -> float:
        """What a link carries in a second."""
        return size * self.factor / seconds / 1e9

    def fitted(self, size: float) -> float | None:
        """Seconds by the line."""
        line = self.line
        return None if line is None else line.seconds(size * self.factor)

    def __str__(self) -> str:
        line = self.line
        if line is None:
            return self.name
        rate = f" and {rate_words(line.bandwidth / 1e9)}" if isfinite(line.bandwidth) else ", whatever the size"
        if line.bend is not None and line.beyond is not None:
            rate += f", {rate_words(line.beyond / 1e9)} above {size_words(line.bend / self.factor)}"
        return f"{self.name}: {time_words(line.latency_s)}{rate}"


def of_rows(rows: Sequence[Row]) -> list[Series]:
    """For each operation and axis."""
    axes = {row.axis for row in rows}
    found = []
    for operation, axis in dict.fromkeys((row.operation, row.axis) for row in rows):
        those = [row for row in rows if (row.operation, row.axis) == (operation, axis)]
        name = operation if len(axes) == 1 else f"{operation} {axis}"
        points = tuple((float(row.bytes), row.seconds) for row in those)
        found.append(Series(f"{name}, {those[0].ranks} ranks", points, bus_factor(operation, those[0].ranks)))
    return found


def of_algorithms(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[Series]:
    """For each all-reduce algorithm."""
    found = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points = tuple((float(row["bytes"]), row["seconds"]) for row in rows if row["algorithm"] == name)
        found.append(Series(name, points, bus_factor("all_reduce", ranks)))
    return found


def size_words(size: float) -> str:
    """As sizes are given: 8, 64K, 128M."""
    return _in_units(size, ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"), (1, "")))


def time_words(seconds: float) -> str:
    """In the unit that suits."""
    return _in_units(seconds, ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"), (1e-9, " ns")))


def rate_words(gb_s: float) -> str:
    """In the unit that suits."""
    return _in_units(gb_s, ((1.0, " GB/s"), (1e-3, " MB/s"), (1e-6, " KB/s"), (1e-9, " B/s")))


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits, in the first unit of which it is at least one when rounded."""
    unit, name = next((one for one in units if value >= 0.9995 * one[0]), units[-1])
    return f"{value / unit:.3g}{name}"
