"""Profiles of chosen steps: a trace of each rank and what its memory was used for, in RUN/profile.

Traces are Chrome's JSON, gzipped, which chrome://tracing and Perfetto read. Memory is JSON as well: on a GPU the
allocator's own snapshot, with who asked for each block; on the CPU every allocation and release in order of time.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.profile_steps import parse_steps, step_mark
from meshwright.torch_private import (
    forget_events,
    memory_events,
    memory_snapshot,
    profiling_all_threads,
    record_memory,
)
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class Profiler(Hook):
    """Profiles the steps of observe.profile_steps on every rank."""

    def __init__(self, steps: str, look: Callable[[profile, int], None]) -> None:
        """`look` is shown the profile when it has ended, with the first of its steps."""
        self._steps, self._look = parse_steps(steps), look
        self._profile: profile | None = None
        self._step: Any = None
        """The mark of the step in hand, in the trace."""
        self._begun = 0
        self._on_gpu = False

    def at_start(self, trainer: TrainingLoop) -> None:
        self._on_gpu = trainer.world.device.type == "cuda"
        if not trainer.finished:
            self._before(trainer, trainer.step + 1)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        self._after()
        is_last = trainer.finished or trainer.stopping or trainer.step not in range(self._begun, self._steps[-1])
        if self._profile is not None and is_last:
            self._write(trainer)
        if not trainer.finished:
            self._before(trainer, trainer.step + 1)

    def before_rollback(self, trainer: TrainingLoop) -> None:
        # Steps that are done again are profiled again.
        self.close()

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self._before(trainer, trainer.step + 1)

    def at_end(self, trainer: TrainingLoop) -> None:
        self._after()
        if self._profile is not None and trainer.step >= self._begun:
            self._write(trainer)

    def close(self) -> None:
        self._after()
        self._stop()

    def _before(self, trainer: TrainingLoop, step: int) -> None:
        if step not in self._steps:
            return
        if self._profile is None:
            self._begun = step
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            if self._on_gpu:
                record_memory(True)
            # Without Python's stacks: with them, PyTorch 2.13 gives some events names that are no text.
            self._profile = profile(
                activities=activities,
                record_shapes=True,
                profile_memory=True,
                # Collectives that threads of ours call, too.
                experimental_config=profiling_all_threads() if trainer.one_step.parallel.sums_beside else None,
            )
            self._profile.start()
        self._step = record_function(step_mark(step))
        self._step.__enter__()

    def _after(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self) -> profile | None:
        """End the profile that runs, if one does."""
        found, self._profile = self._profile, None
        if found is not None:
            found.stop()
            if self._on_gpu:
                record_memory(False)
        return found

    def _write(self, trainer: TrainingLoop) -> None:
        """Write the profile of the steps since it began; what cannot be written ends no training."""
        started = time.perf_counter()
        if self._on_gpu:
            torch.cuda.synchronize()
        memory: Any = memory_snapshot() if self._on_gpu else None
        found = self._stop()
        assert found is not None
        self._look(found, self._begun)
        folder, rank = trainer.job.folder.path / "profile", trainer.world.rank
        name = f"steps-{self._begun}-{trainer.step}.rank-{rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
            _write_json(folder / f"{name}.memory.json.gz", memory or {"events": memory_events(found)})
        except (OSError, RuntimeError, UnicodeError) as error:
            text = f"the profile of rank {rank} cannot be written to {folder}: {error}"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)
            return
        finally:
            forget_events(found)
        if trainer.world.is_first:
            seconds = time.perf_counter() - started
            which = f"steps {self._begun} to {trainer.step}"
            print(f"profile {which}: traces and memory of each rank are in {folder} ({seconds:.1f} s)", flush=True)
            trainer.job.folder.event("profiled", first=self._begun, last=trainer.step, path="profile")


def _write_json(path: Path, content: Any) -> None:
    with gzip.open(path, "wt", compresslevel=3) as file:
        # What is no number, text or list, such as an address, as text.
        json.dump(content, file, default=str)
