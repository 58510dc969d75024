"""Which steps are profiled, and what is made of one: a breakdown, a table of collectives, a timeline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.comm.travel import BACKEND
from meshwright.observe.breakdown import Breakdown, Interval, Step, break_down
from meshwright.observe.collective_rows import Collective, rows
from meshwright.observe.host_phases import Phases
from meshwright.observe.issued import Group
from meshwright.observe.step_profile import StepProfile
from meshwright.observe.step_spans import Span, spans_of
from meshwright.parallel.mesh import Mesh, axes_of
from meshwright.profile_steps import on_demand
from meshwright.torch_private import group_members, is_profiling
from meshwright.training.loop import TrainingLoop

SMALL = 2**16
"""Bytes of a sum that takes no time but for waiting."""
FIRST = 5
"""The first step of a start that is profiled: those before it choose kernels and reserve memory."""

# Made once: json.dumps would make one for each line.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class Profiled:
    """What a profile has shown of a step."""

    breakdown: Breakdown
    collectives: bytes
    """A line with the table of them."""
    spans: bytes
    """A line with the timeline."""


class Profiling:
    """Profiles one step in so many; what goes wrong with it is told once, and no step is profiled from then on."""

    def __init__(self, trainer: TrainingLoop, phases: Phases) -> None:
        self.every = trainer.config.observe.profile_every
        self._on_demand = on_demand(trainer.config.observe.profile_steps)
        self._first = trainer.step + FIRST
        self._phases, self._pulse = phases, trainer.world.pulse
        self._on_gpu = trainer.world.device.type == "cuda"
        self._running: StepProfile | None = None
        self._told = False
        """Whether it was said that groups of collectives are not known: all steps of a run are much the same."""

    @property
    def is_running(self) -> bool:
        """Whether the step in hand is profiled."""
        return self._running is not None

    def is_due(self, step: int) -> bool:
        """Whether this step is to be profiled."""
        if self.every <= 0 or step < self._first or self._is_taken(step):
            return False
        # A step in turn that a profile on demand takes is made up for by the first one after it.
        turn = step - (step - self._first) % self.every
        return all(map(self._is_taken, range(turn, step)))

    def _is_taken(self, step: int) -> bool:
        """Whether a profile on demand is under way in this step; it begins at the end of the step before its own."""
        return step in self._on_demand or step + 1 in self._on_demand

    def begin(self, trainer: TrainingLoop) -> None:
        """The step that begins here is profiled, unless whoever trains has a profiler of their own running."""
        if is_profiling():
            return
        self._phases.begin_timeline()
        try:
            beside = trainer.one_step.parallel.sums_beside
            profile = StepProfile(trainer.world.device, *groups_of(trainer), all_threads=beside)
            self._pulse.waits = []
            profile.start()
        except Exception as error:
            self._phases.end_timeline()
            self._give_up(error)
        else:
            self._running = profile

    def end(self, trainer: TrainingLoop) -> Profiled | None:
        """What the profile of the step that ends here shows; None where there is none."""
        profile, self._running = self._running, None
        if profile is None:
            return None
        try:
            phases = self._phases.end_timeline()
            until = time.monotonic()
            waits, self._pulse.waits = self._pulse.waits or [], None
            seen = profile.stop()
            if seen.problem and not self._told:
                self._told = True
                tell(f"collectives are recorded without their groups: {seen.problem}")
            others, meetings, between = _apart(seen.collectives, self._on_gpu)
            if self._on_gpu:
                waits, between = [*waits, *between], []
            step = Step(
                *(seen.begin, until, phases, seen.compute, others, waits, meetings, between), host=not self._on_gpu
            )
            last = trainer.one_step.parallel.last_step
            passes = last.times()[0] if last is not None else []
            spans = spans_of(phases, until, passes, seen.collectives)
            # Written out here, where it counts as what a profile costs.
            table = encode({"kind": "collectives", "step": trainer.step, "rows": rows(seen.collectives)})
            return Profiled(break_down(step), table, timeline(trainer.step, seen.begin, spans))
        except Exception as error:
            self._give_up(error)
            return None

    def drop(self) -> None:
        """End what is running and look at nothing: the step came to nothing."""
        profile, self._running = self._running, None
        self._pulse.waits = None
        if profile is not None:
            try:
                self._phases.end_timeline()
                profile.drop()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._pulse.waits = None
        if self.every:
            self.every = 0
            tell(f"steps are profiled no more: {error!r}; the run goes on")


def groups_of(trainer: TrainingLoop) -> tuple[dict[str, Group], Group | None]:
    """The process groups of this rank by torch's names of them, and the one in which messages go from rank to rank."""
    mesh, strategy = trainer.one_step.mesh, trainer.job.strategy
    axes = [axis for axis in ("pp", "cp") if getattr(strategy, axis) > 1]
    axes += ["dp"] if trainer.one_step.parallel.travel.all_reduce != BACKEND else []
    transfers = Group(" or ".join(axes), 2) if axes else None
    if mesh is None:
        return {}, transfers
    labels = labels_of(mesh)
    # Experts may be split over just the ranks that hold different samples: then torch has one group for both.
    experts = sorted(mesh.experts["ep"].mesh.flatten().tolist()) if mesh.experts is not None else None
    found = {}
    for name, ranks in group_members().items():
        label = labels.get(" ".join(map(str, ranks)), "other" if len(ranks) > 1 else "itself")
        found[name] = Group(label, len(ranks), exchange="ep" if ranks == experts else "")
    return found, transfers


def _apart(collectives: Iterable[Collective], on_gpu: bool) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """When communication was under way: between whomever, small sums in which stages meet, messages between stages.

    NCCL's kernels wait for the other side themselves, while the host goes on. A host notes what it waits for the next
    stage, but of messages that may go around a ring as well not all of it is known.
    """
    others: list[Interval] = []
    meetings: list[Interval] = []
    between: list[Interval] = []
    for one in collectives:
        kind = others
        if one.is_transfer and (one.group == "pp" or (on_gpu and "pp" in one.group)):
            kind = between
        elif one.group == "pp" and one.bytes <= SMALL:
            kind = meetings
        kind.append((one.begin, one.end))
    return others, meetings, between


def timeline(step: int, begin: float, spans: list[Span]) -> bytes:
    """A line with the spans of a step."""
    rounded = [(name, kind, round(start, 7), round(end, 7)) for name, kind, start, end in spans]
    unix = round(time.time() - time.monotonic(), 6)
    return encode({"step": step, "begin": round(begin, 7), "unix": unix, "spans": rounded})


def encode(line: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return _ENCODER.encode(line).encode()


def labels_of(mesh: Mesh) -> dict[str, str]:
    """What groups are called, by their ranks: the axis of the strategy that they make up."""
    labels = axes_of(mesh)
    data = " ".join(map(str, mesh.data.mesh.flatten().tolist()))
    return labels | ({data: "dp"} if data in labels else {})


def tell(text: str) -> None:
    """Say it to the person, who can go on."""
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
