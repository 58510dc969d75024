"""What every rank records of its steps, in ranks/<rank>.jsonl: where their time went, memory, now and then a profile.

The last hook of a step, so that a step's time goes to the end of all that others do. What it costs is measured and
recorded as well: its own calls, and what a profiled step takes longer than others. Nothing here may end a training.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.estimate.units import Place
from meshwright.observe.breakdown import Breakdown
from meshwright.observe.device_phases import DevicePhases
from meshwright.observe.host_phases import HostPhases, Phases, Timed
from meshwright.observe.line_writer import LineWriter
from meshwright.observe.profiling import Profiled, Profiling, encode
from meshwright.observe.rank_memory import RankMemory, gradient_bytes, optimizer_bytes, parameter_bytes
from meshwright.observe.step_metrics import StepMetrics, chip_of
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

SUM_EVERY = 50
"""Steps between two lines on what recording costs, where none is profiled in between."""

MOST_STEPS = 100
"""Lines of steps that are kept for whoever takes them."""

TELL_AFTER = 5
"""Steps after the first profiled one until its cost is told: those with which it is compared."""

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


class Recorder(Hook):
    """Records the steps of one rank."""

    def __init__(self) -> None:
        self.metrics = StepMetrics()
        """The hook that adds to metrics.jsonl, whose time counts here."""
        self._recording: _Recording | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.finished:
            self._recording = _Recording(trainer)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self._recording is not None:
            try:
                self._recording.end_step(trainer, self.metrics)
            except Exception as error:
                self._give_up(error)

    def before_rollback(self, trainer: TrainingLoop) -> None:
        # The step that sends the run back is not told to the hooks that follow.
        if self._recording is not None and self._recording.last_step != trainer.step:
            self.after_step(trainer, {})

    def at_rollback(self, trainer: TrainingLoop) -> None:
        if self._recording is not None:
            self._recording.begin_again()

    def at_end(self, trainer: TrainingLoop) -> None:
        if self._recording is not None:
            try:
                self._recording.finish()
            except Exception as error:
                self._give_up(error)

    def take_steps(self) -> list[dict[str, Any]]:
        """The newest lines of steps since this was last asked."""
        if self._recording is None:
            return []
        steps = list(self._recording.steps)
        self._recording.steps.clear()
        return steps

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()

    def _give_up(self, error: Exception) -> None:
        """Training is what matters."""
        recording, self._recording = self._recording, None
        with suppress(Exception):
            print(f"meshwright: steps are recorded no more: {error!r}; the run goes on", file=sys.stderr, flush=True)
            if recording is not None:
                recording.close()


class _Recording:
    """The steps of one start of a rank."""

    def __init__(self, trainer: TrainingLoop) -> None:
        world, folder = trainer.world, trainer.job.folder
        self.last_step = 0
        self.steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        """The lines of steps that nobody has taken yet."""
        self._writer = LineWriter(folder.check_generation)
        self._lines, self._spans = rank_files(folder.path, world.rank)
        self._phases: Phases
        if world.device.type == "cuda":
            self._phases = DevicePhases(world.pulse, world.device)
        else:
            self._phases = HostPhases(world.pulse)
        self._profiling = Profiling(trainer, self._phases)
        self._memory = RankMemory(world.device)
        self._pulse, self._model = world.pulse, trainer.model
        self._is_first = world.is_first
        self._rank = rank_facts(trainer)
        self._gradients = 0
        self._is_known = False
        """Whether the line that says who this rank is was written: after a step, when there are states to measure."""
        self._pending: dict[int, tuple[dict[str, Any], Profiled | None]] = {}
        """What there is to say of steps whose times are not known yet."""
        self._cost = Cost(self._profiling.every)
        self._pulse.listeners.append(self._look_at_gradients)
        self._phases.begin()

    def end_step(self, trainer: TrainingLoop, metrics: StepMetrics) -> None:
        """Record the step that ends here."""
        profiled = self._profiling.end(trainer)
        entered = time.perf_counter()
        self.last_step = trainer.step
        self._phases.end_step(trainer.step)
        line = {"kind": "step", "step": trainer.step, "time": round(time.time(), 6)}
        self._pending[trainer.step] = line | {"memory": self._memory.now()}, profiled
        if not self._is_known:
            self._introduce(trainer)
        self._write_steps()
        self._cost.inside += time.perf_counter() - entered + metrics.take_inside()
        if self._profiling.is_due(trainer.step + 1) and not (trainer.finished or trainer.stopping):
            self._profiling.begin(trainer)

    def begin_again(self) -> None:
        """Steps go on from an earlier one."""
        self._profiling.drop()
        self._pending.clear()
        self._phases.begin()

    def finish(self) -> None:
        """The last step is done."""
        self._phases.settle()
        self._write_steps()
        if self._cost.steps:
            self._put(self._cost.line(self.last_step))

    def close(self) -> None:
        """Always, at the end."""
        self._profiling.drop()
        self._phases.close()
        if self._look_at_gradients in self._pulse.listeners:
            self._pulse.listeners.remove(self._look_at_gradients)
        self._writer.close()
        self._memory.close()

    def _look_at_gradients(self, phase: str, _: float) -> None:
        """Before the first update all gradients are there, and nowhere else in a step."""
        if phase == "optimizer" and not self._gradients:
            self._gradients = gradient_bytes(self._model)

    def _introduce(self, trainer: TrainingLoop) -> None:
        self._is_known = True
        self._pulse.listeners.remove(self._look_at_gradients)
        kinds = {
            "parameters": parameter_bytes(trainer.model),
            "gradients": self._gradients,
            "optimizer": optimizer_bytes(trainer.optimizer),
        }
        self._put(self._rank | {"memory_kinds": kinds})

    def _write_steps(self) -> None:
        for timed in self._phases.timed():
            if timed.step not in self._pending:
                continue
            line, profiled = self._pending.pop(timed.step)
            breakdown = profiled.breakdown if profiled is not None else None
            line |= {"seconds": round(timed.seconds, 7), "parts": parts_of(timed, breakdown)}
            line |= facts_of(breakdown) if breakdown is not None else {}
            self._put(line)
            self.steps.append(line)
            if profiled is not None:
                self._writer.put(self._lines, profiled.collectives)
                self._writer.put(self._spans, profiled.spans)
            if self._cost.add(timed, profiled is not None):
                self._put(self._cost.line(timed.step, profiled is not None))
            if self._is_first and self._cost.is_to_tell:
                print(self._cost.sentence(), flush=True)

    def _put(self, line: dict[str, Any]) -> None:
        self._writer.put(self._lines, encode(line))


class Cost:
    """What recording costs."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.inside = 0.0
        """Seconds in calls of the recorder since the last line."""
        self.steps = 0
        self._seconds = 0.0
        self._usual: deque[float] = deque(maxlen=SUM_EVERY)
        """Seconds of steps that were not profiled."""
        self._profiled: float | None = None
        """Seconds of the last step that was."""
        self._is_warm = False
        self._since = 0
        """Steps since the first profiled one, with it."""

    def add(self, timed: Timed, profiled: bool) -> bool:
        """A step more; gives whether it is time for a line."""
        self.steps += 1
        self._seconds += timed.seconds
        # What happens in some steps only would be taken for a profile's cost, or hide it.
        rare = ("evaluate", *[phase for phase, part in PARTS.items() if part == "checkpoint"])
        seconds = timed.seconds - sum(timed.phases.get(phase, 0.0) for phase in rare)
        if profiled:
            self._profiled = seconds
        elif self._is_warm:
            self._usual.append(seconds)
        self._is_warm = True
        self._since += self._since > 0 or profiled
        return profiled or self.steps >= SUM_EVERY

    @property
    def beyond(self) -> float | None:
        """Seconds that the last profiled step took more than others."""
        if self._profiled is None or len(self._usual) < 3:
            return None
        return max(0.0, self._profiled - statistics.median(self._usual))

    @property
    def is_to_tell(self) -> bool:
        """Whether a person is to be told now what profiles cost; once."""
        return self._since == TELL_AFTER + 1 and self.beyond is not None

    def sentence(self) -> str:
        """What profiles cost."""
        cost, usual = self.beyond or 0.0, statistics.median(self._usual)
        share = cost / (cost + self._every * usual)
        return f"watch  profiling 1 step in {self._every} costs {share:.2%} of the time"

    def line(self, step: int, was_profiled: bool = False) -> dict[str, Any]:
        """What recording has cost since the last line; of a step that was profiled also what that has."""
        share = self.inside / self._seconds if self._seconds else 0.0
        found = {"kind": "recorder", "step": step, "inside_s": round(self.inside, 7), "share": round(share, 7)}
        if was_profiled and self.beyond is not None:
            found["profiler_s"] = round(self.beyond, 7)
        self.inside, self._seconds, self.steps = 0.0, 0.0, 0
        return found


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
