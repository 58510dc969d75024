"""Timelines of the steps of observe.profile_steps: one profile of all of them, and what is noted of each as it ends.

There is one profiler at a time. The one that writes traces has seen the collectives, too; the phases and passes are
noted here. Figures such as computing come from `Profiling`: under this profiler, with shapes and memory, steps take
much longer than others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

from meshwright.observe.breakdown import Interval
from meshwright.observe.host_phases import Phases
from meshwright.observe.profile_events import Events
from meshwright.observe.profiling import groups_of, tell, timeline
from meshwright.observe.step_profile import collectives_in, read_events, recorded_calls
from meshwright.observe.step_spans import spans_of
from meshwright.profile_steps import on_demand, step_mark
from meshwright.schedules import Action
from meshwright.torch_private import is_profiling
from meshwright.training.loop import TrainingLoop


@dataclass(frozen=True)
class _Noted:
    """What a step has left."""

    step: int
    window: Interval
    phases: list[tuple[str, float]]
    passes: list[tuple[Action, float, float]]
    calls: list[Mapping[str, Any]]


class Demanded:
    """Makes timelines of steps that are profiled on demand; what goes wrong with that is told and ends no training."""

    def __init__(self, trainer: TrainingLoop, phases: Phases) -> None:
        self._steps = on_demand(trainer.config.observe.profile_steps)
        self._phases = phases
        self._on_gpu = trainer.world.device.type == "cuda"
        self._begun: float | None = None
        """When the step in hand began, where it is one of them."""
        self._noted: list[_Noted] = []
        self._events: Events | None = None

    @property
    def is_running(self) -> bool:
        """Whether the step in hand is one of them."""
        return self._begun is not None

    def begin(self, step: int) -> None:
        """This step begins here."""
        if step in self._steps and is_profiling():
            self._phases.begin_timeline()
            self._begun = time.monotonic()

    def look(self, found: profile, first: int) -> None:
        """The profile has ended; its first step was that one."""
        try:
            self._events = read_events(found, step_mark(first), self._on_gpu, time.monotonic() - time.time())
        except Exception as error:
            self._give_up(error)

    def end(self, trainer: TrainingLoop) -> list[bytes]:
        """The step in hand ends here; gives the timelines of all of them when their profile has ended."""
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        try:
            phases, until = self._phases.end_timeline(), time.monotonic()
            last = trainer.one_step.parallel.last_step
            passes = last.times()[0] if last is not None else []
            # The recorders forget: they are asked after each step.
            calls, problem = recorded_calls((begun, until), time.monotonic() - time.time())
            if problem:
                tell(f"collectives of step {trainer.step} are recorded without their groups: {problem}")
            self._noted.append(_Noted(trainer.step, (begun, until), phases, list(passes), calls))
            return self._lines(trainer)
        except Exception as error:
            self._give_up(error)
            return []

    def drop(self) -> None:
        """The steps came to nothing."""
        if self._begun is not None:
            self._begun = None
            self._phases.end_timeline()
        self._noted, self._events = [], None

    def _lines(self, trainer: TrainingLoop) -> list[bytes]:
        events, self._events = self._events, None
        if events is None:
            return []
        noted, self._noted = self._noted, []
        groups, transfers = groups_of(trainer)
        found = []
        for one in noted:
            collectives = collectives_in(events, one.calls, one.window, groups, transfers)
            spans = spans_of(one.phases, one.window[1], one.passes, collectives)
            found.append(timeline(one.step, one.window[0], spans))
        return found

    def _give_up(self, error: Exception) -> None:
        tell(f"steps of observe.profile_steps have no timeline: {error!r}; the run goes on")
        self._steps, self._noted, self._events = range(0), [], None
