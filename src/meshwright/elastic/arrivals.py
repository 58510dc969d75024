"""Who has arrived at which collective: what each rank tells of its process groups, put together. Without torch.

The ranks of a group call the same collectives in the same order, so the n-th call of one rank belongs to the n-th call
of the others. A rank that waits in the n-th call of a group waits for the ranks of the group that have called fewer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Group = tuple[str, tuple[int, ...]]
"""A process group: its name and its ranks. Names alone may mean different groups on different ranks."""

SAME_EVERYWHERE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier"})
"""Collectives whose tensors have the same size on every rank."""


@dataclass(frozen=True)
class Call:
    """One call of a collective."""

    number: int
    operation: str
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        if self.operation not in SAME_EVERYWHERE:
            return (self.operation,)
        # What ranks give to an all_gather may differ, what comes out may not.
        sizes = self.outputs if self.operation == "all_gather" else self.inputs
        return (self.operation, self.dtypes, tuple(map(_elements, sizes)))

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{list(size)} {dtype.lower()}" for size, dtype in zip(self.inputs, self.dtypes, strict=False)
        )
        return self.operation + (f" of {tensors}" if tensors else "")


@dataclass
class Standing:
    """How far one rank has come in one group."""

    called: int
    done: int
    calls: dict[int, Call] = field(default_factory=dict)
    """The latest, by number; empty when the rank did not answer."""
    gaps: bool = False
    """Whether there were gaps among numbers of calls that are not here."""

    @property
    def has_gaps(self) -> bool:
        """Whether numbers of calls are left out."""
        numbers = sorted(self.calls)
        return self.gaps or any(after != before + 1 for before, after in zip(numbers, numbers[1:], strict=False))

    @property
    def waits_at(self) -> int | None:
        """The number of the collective that the rank is in; None when it is in none of this group."""
        open_calls = [number for number, call in self.calls.items() if not call.done]
        if self.calls:
            return min(open_calls, default=None)
        return self.called if self.called > self.done else None


@dataclass
class Word:
    """What a rank told of its collectives."""

    time: float
    """When, by its machine's monotonic clock."""
    answered: bool
    """Whether this is its answer to the latest question; else it is what it happened to write before."""
    groups: dict[Group, Standing] = field(default_factory=dict)
    descriptions: dict[Group, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """A rank that is in a collective, and the ranks of the group that are not."""

    rank: int
    group: Group
    number: int
    operation: str
    missing: tuple[int, ...]
    """Who has not called it."""
    unknown: tuple[int, ...]
    """Of whom nothing is known here: ranks on machines that have told nothing."""


@dataclass(frozen=True)
class Mismatch:
    """The first call of a group in which ranks differ."""

    group: Group
    number: int
    calls: Mapping[int, Call]
    odd: tuple[int, ...]
    """The ranks that differ from most; all of them where there is no majority."""


def read_word(folder: Path, rank: int, pid: int, asked: int) -> Word | None:
    """What the rank of that process has told last; None when it never has."""
    for name, answered in ((f"{rank}.records", True), (f"{rank}.collectives", False)):
        try:
            said = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if said["pid"] != pid or (answered and said["answers"] != asked):
            continue
        return _word(said, answered)
    return None


def _word(said: dict[str, Any], answered: bool) -> Word:
    word = Word(said["time"], answered)
    by_name: dict[str, Standing] = {}
    for group in said["groups"]:
        key = (group["name"], tuple(group["ranks"]))
        word.groups[key] = by_name[group["name"]] = Standing(group["called"], group["done"])
        word.descriptions[key] = group["description"]
    for record in said.get("records", []):
        if record["group"] in by_name:
            by_name[record["group"]].calls[record["number"]] = Call(
                record["number"],
                record["operation"],
                tuple(map(tuple, record["inputs"])),
                tuple(map(tuple, record["outputs"])),
                tuple(record["dtypes"]),
                record["done"],
            )
    return word


def groups_of(words: Mapping[int, Word]) -> dict[Group, dict[int, Standing]]:
    """By group, how far each of its ranks has come."""
    found: dict[Group, dict[int, Standing]] = {}
    for rank, word in words.items():
        for group, standing in word.groups.items():
            found.setdefault(group, {})[rank] = standing
    return found


def find_mismatch(words: Mapping[int, Word]) -> Mismatch | None:
    """The first call that is not the same on all ranks of a group; of several groups the one with the fewest calls."""
    found = []
    for group, standings in groups_of(words).items():
        if not comparable(standings):
            continue
        numbers = sorted({number for standing in standings.values() for number in standing.calls})
        for number in numbers:
            calls = {rank: one.calls[number] for rank, one in standings.items() if number in one.calls}
            kinds = Counter(call.kind for call in calls.values())
            if len(kinds) > 1:
                (usual, most), *rest = kinds.most_common()
                clear = most > rest[0][1]
                odd = tuple(sorted(rank for rank, call in calls.items() if not clear or call.kind != usual))
                found.append(Mismatch(group, number, calls, odd))
                break
    return min(found, key=lambda mismatch: mismatch.number, default=None)


def find_waits(words: Mapping[int, Word]) -> list[Wait]:
    """Every rank that is in a collective, with those who are missing there."""
    waits = []
    for group, standings in groups_of(words).items():
        reached = max(standing.done for standing in standings.values())
        counted = comparable(standings)
        for rank, standing in standings.items():
            number = standing.waits_at
            if number is None or (not words[rank].answered and number <= reached):
                continue
            others = [other for other in group[1] if other != rank]
            if counted:
                missing = [
                    other
                    for other in others
                    if other in standings and _called(standings[other], words[other], reached) < number
                ]
            else:
                missing = [other for other in others if other in standings and standings[other].waits_at is None]
            # A rank that has told something, but never of this group, has not called anything in it.
            missing += [other for other in others if other in words and other not in standings]
            unknown = tuple(other for other in others if other not in words)
            operation = standing.calls[number].operation if number in standing.calls else "a collective"
            waits.append(Wait(rank, group, number, operation, tuple(sorted(missing)), unknown))
    return waits


def _called(standing: Standing, word: Word, reached: int) -> int:
    """How far a rank has come; of one that does not answer, at least as far as others have seen it."""
    return standing.called if word.answered else max(standing.called, reached)


def comparable(standings: Mapping[int, Standing]) -> bool:
    """Whether the numbers of a group's calls mean the same on all ranks.

    Over gloo, what one rank sends another takes a number as well, on those two alone; then numbers have gaps.
    """
    return not any(standing.has_gaps for standing in standings.values())


def name_of(group: Group, words: Mapping[int, Word]) -> str:
    """A group in words: what it is for, and its ranks."""
    description = next((word.descriptions[group] for word in words.values() if group in word.descriptions), "")
    ranks = "ranks " + " ".join(map(str, group[1])) if group[1] else "ranks not known"
    if description == "default_pg":
        return f"the group of all ranks ({ranks})"
    if description in ("", "undefined"):
        return f"a group of {ranks}"
    return f"the group '{description.removeprefix('mesh_')}' ({ranks})"


def _elements(size: tuple[int, ...]) -> int:
    count = 1
    for length in size:
        count *= length
    return count
