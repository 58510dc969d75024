"""What every rank records of its steps, in ranks/<rank>.jsonl: where their time went, memory, now and then a profile.

The last hook of a step, so that a step's time goes to the end of all that others do. While it waits, numbers are
taken and nothing else; the thread that writes makes lines of them. What it costs is measured and recorded as well.
Nothing here may end a training.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from torch.profiler import profile

from meshwright.observe.demanded import Demanded
from meshwright.observe.device_phases import DevicePhases
from meshwright.observe.host_phases import HostPhases, Phases
from meshwright.observe.line_writer import LineWriter
from meshwright.observe.profiling import Profiled, Profiling, encode
from meshwright.observe.rank_lines import StepRecord, rank_facts, rank_files
from meshwright.observe.rank_memory import RankMemory, gradient_bytes, optimizer_bytes, parameter_bytes
from meshwright.observe.recording_cost import Cost
from meshwright.observe.step_metrics import StepMetrics
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

MOST_STEPS = 100
"""Lines of steps that are kept for whoever takes them."""


class Recorder(Hook):
    """Records the steps of one rank."""

    def __init__(self) -> None:
        self.metrics = StepMetrics()
        """The hook that adds to metrics.jsonl, whose time counts here."""
        self._recording: _Recording | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.finished:
            self._recording = _Recording(trainer, self.metrics.memory or RankMemory(trainer.world.device))

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
        if self._recording is not None:
            self._recording.drop_profiles()

    def at_rollback(self, trainer: TrainingLoop) -> None:
        if self._recording is not None:
            self._recording.begin_again(trainer.step)

    def at_end(self, trainer: TrainingLoop) -> None:
        if self._recording is not None:
            try:
                self._recording.finish()
            except Exception as error:
                self._give_up(error)

    def look_at(self, found: profile, first: int) -> None:
        """A profile of steps on demand has ended, of which that was the first: they get a timeline."""
        if self._recording is not None:
            self._recording.demanded.look(found, first)

    def take_steps(self) -> list[dict[str, Any]]:
        """The newest lines of steps since this was last asked."""
        return self._recording.take_steps() if self._recording is not None else []

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

    def __init__(self, trainer: TrainingLoop, memory: RankMemory) -> None:
        world, folder = trainer.world, trainer.job.folder
        self.last_step = 0
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        """Steps whose lines nobody has taken yet."""
        self._writer = LineWriter(folder.check_generation)
        self._lines, self._spans = rank_files(folder.path, world.rank)
        self._phases: Phases
        if world.device.type == "cuda":
            self._phases = DevicePhases(world.pulse, world.device)
        else:
            self._phases = HostPhases(world.pulse)
        self._profiling = Profiling(trainer, self._phases)
        self._memory = memory
        self._pulse, self._model = world.pulse, trainer.model
        self._is_first = world.is_first
        self._rank = rank_facts(trainer)
        self._gradients = 0
        self._is_known = False
        """Whether the line that says who this rank is was written: after a step, when there are states to measure."""
        self._pending: dict[int, tuple[StepRecord, Profiled | None]] = {}
        """Steps whose times are not known yet."""
        self._cost = Cost(self._profiling.every)
        self._writers_cpu_s = 0.0
        """What of the writer's time is among the cost already."""
        self._pulse.listeners.append(self._look_at_gradients)
        self._phases.begin()
        self.demanded = Demanded(trainer, self._phases)
        self.demanded.begin(trainer.step + 1)

    def end_step(self, trainer: TrainingLoop, metrics: StepMetrics) -> None:
        """Record the step that ends here."""
        profiled = self._profiling.end(trainer) if self._profiling.is_running else None
        on_demand = self.demanded.is_running
        for spans in self.demanded.end(trainer):
            self._writer.put(self._spans, spans)
        entered = time.perf_counter()
        self.last_step = step = trainer.step
        self._phases.end_step(step)
        breakdown = profiled.breakdown if profiled is not None else None
        self._pending[step] = StepRecord(step, self._memory.now(), breakdown, on_demand), profiled
        if not self._is_known:
            self._introduce(trainer)
        self._write_steps()
        is_due = self._profiling.is_due(step + 1) and not (trainer.finished or trainer.stopping)
        self._cost.add_calls(time.perf_counter() - entered + metrics.take_inside())
        if is_due:
            self._profiling.begin(trainer)
        else:
            self.demanded.begin(step + 1)

    def take_steps(self) -> list[dict[str, Any]]:
        """The newest lines of steps since this was last asked."""
        entered = time.perf_counter()
        lines = [record.line() for record in self._steps]
        self._steps.clear()
        self._cost.inside += time.perf_counter() - entered
        return lines

    def drop_profiles(self) -> None:
        """The step in hand comes to nothing; whoever profiles on demand may begin from now on."""
        self._profiling.drop()
        self.demanded.drop()

    def begin_again(self, step: int) -> None:
        """Steps go on after an earlier one."""
        self._pending.clear()
        self._phases.begin()
        self.demanded.begin(step + 1)

    def finish(self) -> None:
        """The last step is done."""
        self._phases.settle()
        self._write_steps()
        if self._cost.steps:
            self._put_cost(self.last_step)

    def close(self) -> None:
        """Always, at the end."""
        self.drop_profiles()
        self._phases.close()
        if self._look_at_gradients in self._pulse.listeners:
            self._pulse.listeners.remove(self._look_at_gradients)
        self._writer.close()

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
            record, profiled = self._pending.pop(timed.step)
            record.timed = timed
            self._writer.put(self._lines, record.encoded)
            self._steps.append(record)
            if profiled is not None:
                self._writer.put(self._lines, profiled.collectives)
                self._writer.put(self._spans, profiled.spans)
            if self._cost.add(timed, profiled is not None):
                self._put_cost(timed.step, profiled is not None)
            if self._is_first and self._cost.is_to_tell:
                print(self._cost.sentence(), flush=True)

    def _put_cost(self, step: int, was_profiled: bool = False) -> None:
        # What the thread takes it takes from the training, which has the same lock to wait for.
        spent, self._writers_cpu_s = self._writer.cpu_s - self._writers_cpu_s, self._writer.cpu_s
        self._cost.inside += spent
        self._put(self._cost.line(step, was_profiled))

    def _put(self, line: dict[str, Any]) -> None:
        self._writer.put(self._lines, encode(line))
