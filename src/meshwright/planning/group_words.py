"""Machines of several kinds in words and numbers: who is on which chip, and what the ways to use them come to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from meshwright.planning.group_search import SLOWER
from meshwright.planning.group_times import columns_of
from meshwright.planning.memory import GIB
from meshwright.planning.question import Candidate, Found


@dataclass(frozen=True)
class Placed:
    """What the chips of one group do."""

    chip: str
    ranks: tuple[int, int]
    """First and last."""
    pipeline_ranks: tuple[int, ...]
    layers: tuple[int, ...]
    """Of each of these."""
    data_ranks: tuple[int, ...]
    shares: tuple[int, ...]
    """Of every micro-step's samples, those that there are; empty where all ranks get the same."""
    is_pipeline: bool

    def __str__(self) -> str:
        text = f"ranks {_range(self.ranks)} on {self.chip}: "
        parts = []
        if self.is_pipeline:
            sizes = "+".join(map(str, self.layers))
            parts.append(f"pipeline {_ranks(self.pipeline_ranks)} with {sizes} layers")
        parts.append(f"data {_ranks(self.data_ranks)}")
        if self.shares:
            parts.append(f"{' or '.join(map(str, self.shares))} share{'s' if max(self.shares) > 1 else ''} each")
        return text + ", ".join(parts)


def placed(candidate: Candidate) -> list[Placed]:
    """Who is where; nothing where all machines are of one kind."""
    scenario = candidate.scenario
    cluster, layout = scenario.cluster, scenario.layout
    columns = columns_of(cluster, layout)
    ends = list(accumulate(group.gpus for group in cluster.groups))
    found = []
    for index, group in enumerate(cluster.groups):
        stages = sorted({rank for one in columns for rank, held in enumerate(one.groups) if held == index})
        own = [one for one in columns if index in one.groups]
        found.append(
            Placed(
                chip=group.chip.name,
                ranks=(ends[index] - group.gpus, ends[index] - 1),
                pipeline_ranks=tuple(stages),
                layers=tuple(sum(map(len, scenario.stages[rank])) for rank in stages),
                data_ranks=tuple(sorted(rank for one in own for rank in one.data_ranks)),
                shares=tuple(sorted({one.share for one in own})) if layout.shares != "even" else (),
                is_pipeline=layout.pp > 1,
            )
        )
    return found


def placed_json(candidate: Candidate) -> list[dict[str, Any]]:
    """The same as data."""
    names = ("chip", "ranks", "pipeline_ranks", "layers", "data_ranks", "shares")
    return [{name: getattr(one, name) for name in names} for one in placed(candidate)]


def stage_chips(candidate: Candidate) -> list[str]:
    """The chip that each pipeline rank fills the most, where there are several kinds."""
    memory = candidate.memory
    found = []
    for rank in range(len(memory.stages)):
        held = [one for one in placed(candidate) if rank in one.pipeline_ranks]
        rooms = {group.chip.name: group.memory for group in candidate.scenario.cluster.groups}
        found.append(min(held, key=lambda one: abs(rooms[one.chip] - memory.room(rank))).chip)
    return found


def ways(found: Found | None) -> list[str]:
    """What each way to use the machines comes to."""
    if found is None or not found.ways or found.best is None:
        return []
    best, lines = found.best, []
    for name, candidate in found.ways.items():
        if candidate is None:
            lines.append(f"{name}: nothing fits, or it is more than {SLOWER - 1:.0%} slower")
            continue
        slower = candidate.step_s / best.step_s - 1
        word = "the choice" if candidate == best else f"{slower:+.1%}"
        lines.append(f"{name}: {candidate.strategy}, {candidate.step_s:.3f} s ({word})")
    return lines


def ways_json(found: Found | None) -> list[dict[str, Any]]:
    """The same as data."""
    return [
        {
            "way": name,
            "strategy": str(candidate.strategy) if candidate is not None else None,
            "micro_batch": candidate.micro_batch if candidate is not None else None,
            "gpus": candidate.scenario.cluster.gpus if candidate is not None else None,
            "step_time_s": round(candidate.step_s, 6) if candidate is not None else None,
            "peak_gib": round(candidate.memory.peak / GIB, 3) if candidate is not None else None,
        }
        for name, candidate in (found.ways if found is not None else {}).items()
    ]


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


def _ranks(numbers: tuple[int, ...]) -> str:
    """Ranks in words: `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"rank{'s' if len(numbers) > 1 else ''} " + ", ".join(_range((first, last)) for first, last in runs)
