"""The collectives of a step as a table: how many bytes each kind moved, and how fast. No torch.

Bandwidths are those of nccl-tests: the algorithm's is bytes by seconds, and the bus's is that times what every link had
to carry of it, so that it compares with what the hardware can do whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.comm.bandwidth import bus_factor


@dataclass(frozen=True)
class Collective:
    """One collective or transfer of this rank."""

    operation: str
    group: str
    ranks: int
    """How many take part; 0 where that is not known."""
    bytes: int
    """The larger of what goes in and what comes out."""
    begin: float
    end: float

    @property
    def is_transfer(self) -> bool:
        """Whether it goes from one rank to another."""
        return self.operation in ("send", "receive")

    @property
    def name(self) -> str:
        """What it is called on a timeline."""
        return f"{self.operation} {self.group} {human_bytes(self.bytes)}"


def rows(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Collectives of one kind, group and class of sizes in one row each; with itself alone no rank moves anything."""
    found: dict[tuple[str, str, int, str], list[Collective]] = {}
    for one in collectives:
        if one.ranks == 1:
            continue
        found.setdefault((one.group, one.operation, one.ranks, size_class(one.bytes)), []).append(one)
    table = []
    for (group, operation, ranks, size), members in sorted(found.items()):
        moved, seconds = sum(one.bytes for one in members), sum(one.end - one.begin for one in members)
        speed = moved / seconds / 1e9 if seconds > 0 else 0.0
        table.append(
            {
                "group": group,
                "operation": operation,
                "size": size,
                "count": len(members),
                "bytes": moved,
                "seconds": round(seconds, 9),
                "algorithm_gb_s": _digits(speed),
                "bus_gb_s": _digits(speed * bus_factor(operation, ranks)),
            }
        )
    return table


def size_class(count: int) -> str:
    """The class of sizes that some bytes are in: from a power of four to the next."""
    if count < 1024:
        return "below 1 KiB"
    low = 1024
    while low * 4 <= count:
        low *= 4
    (begin, begin_unit), (end, end_unit) = _whole(low), _whole(low * 4)
    return f"{begin}-{end} {end_unit}" if begin_unit == end_unit else f"{begin} {begin_unit}-{end} {end_unit}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _whole(count: int) -> tuple[int, str]:
    power = 0
    while count >= 1024 and power + 1 < len(_UNITS):
        count, power = count // 1024, power + 1
    return count, _UNITS[power]


def human_bytes(count: float) -> str:
    """Bytes in the unit that fits, such as 4.0 MiB."""
    power = 0
    while count >= 1024 and power + 1 < len(_UNITS):
        count, power = count / 1024, power + 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} B"


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
