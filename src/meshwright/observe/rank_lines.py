"""The lines of ranks/<rank>.jsonl: who a rank is, and what became of a step."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.estimate.units import Place
from meshwright.observe.breakdown import Breakdown
from meshwright.observe.host_phases import Timed
from meshwright.observe.profiling import encode
from meshwright.observe.step_metrics import chip_of
from meshwright.training.loop import TrainingLoop

PARTS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduce",
    "optimizer": "optimizer",
    "evaluate": "evaluate",
    "stage": "checkpoint",
    "write": "checkpoint",
    "commit": "checkpoint",
    "retention": "checkpoint",
    "hooks": "hooks",
}
"""The part of a step that a phase belongs to; time of other phases, and of none, is not attributed."""


class StepRecord:
    """What there is to say of a step: numbers are taken when it ends, and made a line when somebody wants it."""

    __slots__ = ("_line", "breakdown", "memory", "on_demand", "step", "time", "timed")

    def __init__(self, step: int, memory: dict[str, int], breakdown: Breakdown | None, on_demand: bool = False) -> None:
        self.step, self.memory, self.breakdown = step, memory, breakdown
        self.on_demand = on_demand
        """Whether it was one of observe.profile_steps."""
        self.time = time.time()
        self.timed: Timed | None = None
        """Its times, which a GPU tells later."""
        self._line: dict[str, Any] | None = None

    def line(self) -> dict[str, Any]:
        """The line, of a step whose times are known; may be asked from any thread."""
        if self._line is None:
            assert self.timed is not None
            line = {"kind": "step", "step": self.step, "time": round(self.time, 6), "memory": self.memory}
            line |= {"seconds": round(self.timed.seconds, 7), "parts": parts_of(self.timed, self.breakdown)}
            line |= {"on_demand": True} if self.on_demand else {}
            self._line = line | (facts_of(self.breakdown) if self.breakdown is not None else {})
        return self._line

    def encoded(self) -> bytes:
        """The line as it is written."""
        return encode(self.line())


def rank_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Where a rank's lines are, and its spans."""
    return folder / "ranks" / f"{rank:05d}.jsonl", folder / "ranks" / f"{rank:05d}.spans.jsonl"


def rank_facts(trainer: TrainingLoop) -> dict[str, Any]:
    """Who this rank is, where, and what it has of the model and the data."""
    world, strategy = trainer.world, trainer.job.strategy
    place = Place.of(strategy, world.rank, trainer.job.order)
    replica = place.replicate * strategy.shard + place.shard
    chip = chip_of(world.device)
    return {
        "kind": "rank",
        "rank": world.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "generation": world.pulse.generation,
        "time": round(time.time(), 6),
        "device": str(world.device),
        "chip": chip.name if chip is not None else None,
        "world": world.size,
        "coordinates": {
            "pp": place.pp,
            "dp": replica,
            "cp": place.cp,
            "tp": place.tp,
            "ep": replica % strategy.ep,
        },
        "strategy": str(strategy),
        "monotonic": round(time.monotonic(), 6),
    }


def parts_of(timed: Timed, breakdown: Breakdown | None) -> dict[str, float]:
    """The parts of a step, which add up to its seconds; those that took no time are left out."""
    parts: dict[str, float] = {}
    for phase, seconds in timed.phases.items():
        part = PARTS.get(phase, "unattributed")
        parts[part] = parts.get(part, 0.0) + seconds
    if breakdown is not None:
        for name, found in (("communication", breakdown.exposed_in), ("bubble", breakdown.bubble_in)):
            for phase, seconds in found.items():
                part = PARTS.get(phase, "unattributed")
                moved = min(seconds, parts.get(part, 0.0))
                parts[part] = parts.get(part, 0.0) - moved
                parts[name] = parts.get(name, 0.0) + moved
    rest = timed.seconds - sum(parts.values())
    parts["unattributed"] = parts.get("unattributed", 0.0) + max(0.0, rest)
    return {name: rounded for name, seconds in parts.items() if (rounded := round(seconds, 7)) > 0}


def facts_of(breakdown: Breakdown) -> dict[str, Any]:
    """What the line of a profiled step has beside."""
    return {
        "profiled": True,
        "communication": {"exposed": round(breakdown.exposed, 7), "overlapped": round(breakdown.overlapped, 7)},
        "bubble": round(breakdown.bubble, 7),
        "compute": round(breakdown.compute, 7),
        "idle": round(breakdown.idle, 7),
        "exposed_in": _by_part(breakdown.exposed_in),
        "bubble_in": _by_part(breakdown.bubble_in),
    }


def _by_part(phases: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase, seconds in phases.items():
        part = PARTS.get(phase, "unattributed")
        found[part] = round(found.get(part, 0.0) + seconds, 7)
    return found
