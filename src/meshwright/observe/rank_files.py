"""What the ranks of a run have recorded: ranks/<rank>.jsonl, and the spans of profiled steps beside it."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.observe.curves import RECENT_STEPS, number
from meshwright.observe.rank_times import RankTimes
from meshwright.observe.tail import Line, Tail
from meshwright.profile_steps import is_usual

RECENT = 200
"""Steps of a rank that are kept."""
MOST_FILES = 65536
_FILE = re.compile(r"(\d{5,7})\.jsonl")


@dataclass
class RankRecord:
    """What one rank has said of itself: the lines as they are, the newest of each kind."""

    rank: int
    start: Line = field(default_factory=dict)
    """The `rank` line of its newest start."""
    steps: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Its newest step lines, each step once."""
    times: RankTimes = field(default_factory=RankTimes)
    """All of its steps, added up."""
    profiled: Line | None = None
    collectives: Line | None = None
    recorder: Line | None = None

    def take(self, line: Line) -> None:
        """Note a line of the rank's file."""
        match line.get("kind"):
            case "rank":
                self.start = line
            case "step" if number(line.get("step")) is not None:
                self._forget_from(line["step"])
                self.steps.append(line)
                self.times.add(line)
                if line.get("profiled"):
                    self.profiled = line
            case "collectives":
                self.collectives = line
            case "recorder":
                self.recorder = line

    def _forget_from(self, step: float) -> None:
        """After a restart, steps are computed again: what was said of them and of later ones is over."""
        undone = []
        while self.steps and self.steps[-1]["step"] >= step:
            undone.append(self.steps.pop())
        if undone:
            self.times.undo(undone, max(len(undone), round(undone[0]["step"] - step) + 1))

    @property
    def last(self) -> Line | None:
        """Its newest step line."""
        return self.steps[-1] if self.steps else None

    def mean_steps(self) -> list[Line]:
        """The steps over which means go: its newest ones, profiled ones left out where others are there."""
        recent = list(self.steps)[-RECENT_STEPS:]
        return list(filter(is_usual, recent)) or recent

    def mean_parts(self) -> dict[str, float]:
        """Seconds of a step by part: the mean over `mean_steps`."""
        chosen = self.mean_steps()
        sums: dict[str, float] = {}
        for line in chosen:
            for name, seconds in parts_of(line).items():
                sums[name] = sums.get(name, 0.0) + seconds
        return {name: seconds / len(chosen) for name, seconds in sums.items()}

    @property
    def waits_of(self) -> int | None:
        """The newest profiled step that says in which parts its waiting lies; None where there is none."""
        line = self.profiled or {}
        step = number(line.get("step"))
        told = isinstance(line.get("exposed_in"), dict) or isinstance(line.get("bubble_in"), dict)
        return int(step) if told and step is not None else None

    def split_parts(self) -> dict[str, float]:
        """As `mean_parts`, with exposed communication and bubble apart from the parts in which they lie.

        Of a part they have the share that they had of it in the newest profiled step: whole seconds would not do, since
        a step under the profiler takes longer. Without such a step all waiting stays where it is.
        """
        parts = self.mean_parts()
        if self.waits_of is None or "communication" in parts or "bubble" in parts:
            return parts
        line = self.profiled or {}
        exposed, bubble, rest = (numbers_of(line.get(name)) for name in ("exposed_in", "bubble_in", "parts"))
        found = dict(parts)
        for name, seconds in parts.items():
            waits = {"communication": max(0.0, exposed.get(name, 0.0)), "bubble": max(0.0, bubble.get(name, 0.0))}
            whole = max(0.0, rest.get(name, 0.0)) + sum(waits.values())
            for wait, waited in waits.items():
                if waited > 0:
                    found[wait] = found.get(wait, 0.0) + seconds * (waited / whole)
                    found[name] -= seconds * (waited / whole)
        return found


def parts_of(line: Line | None) -> dict[str, float]:
    """The parts of a step line that are numbers."""
    return numbers_of((line or {}).get("parts"))


def numbers_of(value: object) -> dict[str, float]:
    """The entries of an object that are numbers."""
    if not isinstance(value, dict):
        return {}
    return {str(name): found for name, one in value.items() if (found := number(one)) is not None}


class RankFiles:
    """Follows the files of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[int, RankRecord] = {}
        self._tails: dict[int, Tail] = {}
        self._spans: dict[int, Tail] = {}
        self._profiles: dict[int, deque[Line]] = {}

    def refresh(self) -> None:
        """Read what was added since the last call."""
        for rank in self._ranks():
            if rank not in self._tails:
                self._tails[rank] = Tail(self.folder / f"{rank:05d}.jsonl")
        for rank, tail in self._tails.items():
            added = tail.read()
            if added.anew or rank not in self.records:
                self.records[rank] = RankRecord(rank)
            for line in added.lines:
                self.records[rank].take(line)

    def spans(self, ranks: Iterable[int]) -> dict[int, Line]:
        """The newest profiled step that all these ranks have the spans of, by rank; empty where there is none."""
        by_step: list[dict[Any, Line]] = []
        wanted = list(ranks)
        for rank in wanted:
            tail = self._spans.setdefault(rank, Tail(self.folder / f"{rank:05d}.spans.jsonl"))
            added = tail.read()
            kept = self._profiles.setdefault(rank, deque(maxlen=4))
            if added.anew:
                kept.clear()
            kept.extend(added.lines)
            by_step.append({line.get("step"): line for line in kept if number(line.get("step")) is not None})
        common = set(by_step[0]).intersection(*by_step[1:]) if by_step else set()
        if not common:
            return {}
        newest = max(common)
        return {rank: lines[newest] for rank, lines in zip(wanted, by_step, strict=True)}

    def _ranks(self) -> list[int]:
        try:
            with os.scandir(self.folder) as entries:
                found = [match for entry in entries if (match := _FILE.fullmatch(entry.name))]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found)[:MOST_FILES]
