"""Ranks tell each other now and then what they spent on themselves; the first one says who is slow, and in what.

A handful of numbers from every rank every observe.straggler_every steps, over a group of their own: the ranks that are
fast do not wait for an answer.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from meshwright.observe.own_time import alone_in, own_seconds
from meshwright.observe.plan_file import PlanFile
from meshwright.observe.stragglers import Sections, Stragglers, sentence
from meshwright.parallel.exchange import Exchange
from meshwright.planning.stage_work import stage_work
from meshwright.profile_steps import is_usual
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

TakeLines = Callable[[], list[dict[str, Any]]]
"""Gives the lines of steps that were recorded since it was last asked."""


class StragglerWatch(Hook):
    """Finds ranks that are slower than others that do the same."""

    def __init__(self, take_lines: TakeLines, plan: PlanFile) -> None:
        self._take_lines, self._plan = take_lines, plan
        self._channel: Exchange | None = None
        self._ranks: list[dict[str, Any]] = []
        """Of every rank its machine, the kind of its work and its place in the pipeline; on the first rank."""
        self._work: list[dict[str, float]] = []
        """What phases should take on each rank of a pipeline; on the first rank."""
        self._judge = Stragglers()
        self._alone: frozenset[str] = frozenset()

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.size == 1 or not trainer.config.observe.straggler_every or trainer.finished:
            return
        strategy, step = trainer.job.strategy, trainer.one_step
        counts = trainer.config.data.bad_samples == "skip"
        self._alone = alone_in(strategy, experts=trainer.job.spec.experts is not None, counts_targets=counts)
        pipeline = step.parallel.pipeline
        stage = pipeline.rank if pipeline is not None else 0
        kind = f"stage {stage} share {strategy.data_shares[step.data_rank]}"
        # Its own, because saves that go on in the background use the trainer's.
        self._channel = trainer.world.side_channel()
        self._ranks = self._channel.collect({"host": socket.gethostname(), "kind": kind, "stage": stage})
        if self._plan.expected is not None:
            self._work = stage_work(self._plan.expected)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self._channel is None or trainer.step % trainer.config.observe.straggler_every:
            return
        lines = self._take_lines()
        own = {phase: round(seconds, 7) for phase, seconds in own_seconds(lines, self._alone).items()}
        # What a profile costs is no part of what a step takes.
        usual = [line["seconds"] for line in list(filter(is_usual, lines)) or lines]
        step_s = round(median(usual), 7) if usual else 0.0
        told = self._channel.collect({"own": own, "step_s": step_s})
        if trainer.world.is_first:
            self._tell(trainer, told)

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self._take_lines()

    def _tell(self, trainer: TrainingLoop, told: list[dict[str, Any]]) -> None:
        window = [
            Sections(rank, said["own"], said["step_s"], known["kind"], known["host"], self._work_of(known["stage"]))
            for rank, (said, known) in enumerate(zip(told, self._ranks, strict=True))
        ]
        verdict = self._judge.judge(window)
        for slow in verdict.named:
            facts = {name: _rounded(value) for name, value in asdict(slow).items()}
            trainer.job.folder.event("straggler", step=trainer.step, **facts)
            _say(f"{sentence(slow)} (step {trainer.step})")
        for slow in verdict.cleared:
            trainer.job.folder.event(
                "straggler_cleared", step=trainer.step, rank=slow.rank, host=slow.host, phase=slow.phase
            )
            _say(f"rank {slow.rank} on {slow.host} is no longer slow in {slow.phase} (step {trainer.step})")

    def _work_of(self, stage: int) -> dict[str, float]:
        return self._work[stage] if self._work else {}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _say(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
