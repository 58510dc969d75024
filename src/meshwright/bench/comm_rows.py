"""Measured collectives as rows of a table: sizes as nccl-tests takes them, bandwidths, lines through them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.cluster.link_lines import LinkLine
from meshwright.comm.bandwidth import Line, bus_factor
from meshwright.comm.fitted_line import fit_bent
from meshwright.errors import UserError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST_KEPT = 1 << 16
HEADER = f"{'size':>12}{'count':>12}{'type':>10}{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'spread':>8}"
UNITS = f"{'(B)':>12}{'(elements)':>12}{'':>10}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"


@dataclass(frozen=True)
class Row:
    """One operation in the groups of one axis, at one size."""

    operation: str
    axis: str
    ranks: int
    """Of a group."""
    groups: int
    """That did it at the same time."""
    bytes: int
    count: int
    dtype: str
    seconds: float
    """Of a call, the median; on a GPU the mean."""
    calls: int
    wrong: int | None
    """Elements on all ranks that were wrong; None where nobody looked."""
    inside: int
    """Ranks of a group that share a machine."""
    node: int
    """Ranks of a machine."""
    mean_s: float | None = None
    """Of a call, the mean, as nccl-tests has it."""
    quick_s: float | None = None
    """A quarter of the calls took no longer; None where single calls are not timed."""
    slow_s: float | None = None
    """A quarter of the calls took as long or longer."""

    @property
    def spread(self) -> float | None:
        """How far the middle half of the calls lies apart, as a share of the time; None of one call."""
        if self.quick_s is None or self.slow_s is None or self.seconds <= 0 or self.calls < 2:
            return None
        return (self.slow_s - self.quick_s) / self.seconds

    @property
    def algorithm_gb_s(self) -> float:
        """Size by time."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def bus_gb_s(self) -> float:
        """What a link carries."""
        return self.algorithm_gb_s * bus_factor(self.operation, self.ranks)

    def __str__(self) -> str:
        wrong = "N/A" if self.wrong is None else str(self.wrong)
        spread = "N/A" if self.spread is None else f"{self.spread:.0%}"
        return (
            f"{self.bytes:12d}{self.count:12d}{self.dtype:>10}{_time(self.seconds * 1e6):>11}"
            f"{self.algorithm_gb_s:9.2f}{self.bus_gb_s:9.2f}{wrong:>8}{spread:>8}"
        )

    def as_json(self) -> dict[str, Any]:
        """For files."""
        derived = {"algorithm_gb_s": self.algorithm_gb_s, "bus_gb_s": self.bus_gb_s, "spread": self.spread}
        return asdict(self) | derived


def _time(us: float) -> str:
    """As nccl-tests writes it: four digits at least."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10000 else f"{us:.0f}"


def sizes(begin: str, end: str, factor: int) -> list[int]:
    """From one size to another, each so many times the one before."""
    low, high = parse_size(begin), parse_size(end)
    if factor < 2 and low != high:
        raise UserError(f"-f {factor}: sizes grow by a whole factor from 2")
    if low > high or low < 1:
        raise UserError(f"-b {begin} -e {end}: give a smallest size of at least a byte and a largest that is no less")
    found = [low]
    while factor >= 2 and found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return found


def parse_size(text: str) -> int:
    """Bytes: "8", "64K", "128M", "1G"."""
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"{text}: write a size as a whole number of bytes, with K, M or G for powers of 1024")
    return int(match[1]) * _UNITS[match[2].upper()]


def lines_through(rows: Sequence[Row]) -> Iterator[tuple[Row, Line]]:
    """Latency and bandwidth of each operation on each axis, with a row that says which."""
    for key in dict.fromkeys((row.operation, row.axis) for row in rows):
        those = [row for row in rows if (row.operation, row.axis) == key]
        found = fit_bent([(row.bytes * bus_factor(row.operation, row.ranks), row.seconds) for row in those])
        if found is not None:
            yield those[0], found


def kept_lines(rows: Sequence[Row], backend: str, torch: str, when: str) -> tuple[list[LinkLine], list[str]]:
    """The lines that say something about larger sizes, too, for plans; and which operations' do not."""
    kept, left = [], []
    for row, line in lines_through(rows):
        largest = max(one.bytes for one in rows if (one.operation, one.axis) == (row.operation, row.axis))
        mostly_bytes = line.seconds(largest * bus_factor(row.operation, row.ranks)) > 2 * line.latency_s
        # Below some size noise alone can look like a bandwidth.
        if mostly_bytes and largest >= _LEAST_KEPT:
            kept.append(
                LinkLine(
                    row.operation,
                    row.axis,
                    row.ranks,
                    row.inside,
                    row.node,
                    backend,
                    **line._asdict(),
                    torch=torch,
                    when=when,
                )
            )
        else:
            left.append(f"{row.operation} over {row.axis}")
    return kept, left
