"""Links between the chips of a cluster: inside a node, a chip's network card, and paths between nodes. No torch.

A node here is what the fast links join: a machine, or several of them where the links reach further. Paths are what was
measured or is known between named machines, which need not be the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError, nearest

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster


@dataclass(frozen=True)
class Path:
    """A way between machines whose bandwidth all that goes from one side to the other shares."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of machines."""
    bandwidth: float
    """GB/s, in each direction."""


@dataclass(frozen=True)
class Fabric:
    """Chips in nodes, and what their links carry; bytes per second, in each direction."""

    counts: tuple[int, ...]
    """Chips of each node."""
    link: float
    """Of a chip, to others of its node."""
    nic: float
    """Of a chip, to other nodes."""
    paths: tuple[tuple[frozenset[int], frozenset[int], float], ...] = ()
    """Between the nodes of two sides."""
    names: tuple[str, ...] = ()

    @property
    def starts(self) -> list[int]:
        """The first chip of each node."""
        return [0, *accumulate(self.counts)][:-1]

    @property
    def nodes(self) -> range:
        """Their numbers."""
        return range(len(self.counts))

    @cached_property
    def routes(self) -> dict[tuple[int, int], list[tuple[int, bool]]]:
        """The paths between two nodes, by number, and whether they go that way or the other."""
        found: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for number, (first, second, _) in enumerate(self.paths):
            for one, other in product(first, second):
                found.setdefault((one, other), []).append((number, True))
                found.setdefault((other, one), []).append((number, False))
        return found

    def joined(self, one: int, other: int) -> float:
        """Bytes per second between two nodes, where all that share a path use it at once: each pair has its part."""
        return self._joined[one][other]

    @cached_property
    def _joined(self) -> list[list[float]]:
        found = [[float("inf")] * len(self.counts) for _ in self.counts]
        for first, second, bandwidth in self.paths:
            # As many pairs can use it at the same time, with a node in one of them only.
            part = bandwidth / min(len(first), len(second))
            for one, other in product(first, second):
                found[one][other] = found[other][one] = min(found[one][other], part)
        return found

    @cached_property
    def kinds(self) -> list[int]:
        """For each node, the first one that could stand in its place: it has the same links to all others, nearly."""
        rows = [[float(f"{self.joined(one, other):.1e}") for other in self.nodes] for one in self.nodes]
        found: list[int] = []
        for one in self.nodes:
            alike = (
                first
                for first in dict.fromkeys(found)
                if all(rows[one][node] == rows[first][node] for node in self.nodes if node not in (one, first))
            )
            found.append(next(alike, one))
        return found

    @property
    def is_uniform(self) -> bool:
        """Whether it makes no difference which node is which."""
        return not self.paths and len(set(self.counts)) == 1


def fabric_of(cluster: Cluster, names: Sequence[str] = (), counts: Sequence[int] = ()) -> Fabric:
    """The links of a cluster; of machines that have met, with these names and ranks, where they have."""
    if not counts:
        full, rest = divmod(cluster.gpus, cluster.domain)
        counts = [cluster.domain] * full + [rest] * (rest > 0)
        names = names or cluster.names[: len(counts)]
    number = {name: index for index, name in enumerate(names)}
    paths = []
    for one in cluster.paths:
        first, second = (frozenset(number[name] for name in side if name in number) for side in one.sides)
        if first and second:
            paths.append((first, second, one.bandwidth * 1e9))
    return Fabric(tuple(counts), cluster.link * 1e9, cluster.nic * 1e9, tuple(paths), tuple(names))


def read_names(where: str, table: dict[str, Any], nodes: int) -> tuple[str, ...]:
    """The machines' names in a cluster file; none where it has none."""
    names = table.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name and name.isprintable() for name in names):
        raise UserError(f'{where}: names must be a list of host names, such as names = ["a", "b"]')
    if names and (len(names) != nodes or len(set(names)) != nodes):
        raise UserError(
            f"{where}: names has {len(set(names))} different ones for {nodes} nodes; name each of them once"
        )
    return tuple(names)


def read_paths(where: str, table: dict[str, Any], names: Sequence[str]) -> tuple[Path, ...]:
    """The [[path]] tables of a cluster file."""
    tables = table.get("path", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise UserError(f"{where}: path must be [[path]] tables, each with between and gb_s")
    if tables and not names:
        raise UserError(f"{where}: [[path]] goes between machines by name; list their names, in the order of the ranks")
    return tuple(_path(f"{where}, path {number}", one, names) for number, one in enumerate(tables, 1))


def _path(where: str, table: dict[str, Any], names: Sequence[str]) -> Path:
    for key in table:
        if key not in ("between", "gb_s"):
            raise UserError(f"{where}: unknown key '{key}'{nearest(key, ('between', 'gb_s'))}; it has between, gb_s")
    bandwidth, between = table.get("gb_s"), table.get("between")
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not 0 < bandwidth < float("inf"):
        raise UserError(f"{where}: gb_s={bandwidth!r} must be a number above zero")
    if not isinstance(between, list) or len(between) != 2:
        raise UserError(f'{where}: between must be two machines or two lists of them, such as between = ["a", "b"]')
    sides = [tuple(side) if isinstance(side, list) else (side,) for side in between]
    for name in (*sides[0], *sides[1]):
        if name not in names:
            raise UserError(f"{where}: {name!r} is not one of the names {', '.join(names)}")
    if not sides[0] or not sides[1] or set(sides[0]) & set(sides[1]):
        raise UserError(f"{where}: between needs machines on both sides, and none on both")
    return Path((sides[0], sides[1]), float(bandwidth))
