"""plan.json: what was expected of the run's strategy, and at its end what came of it, which the next plan knows."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.observe.curves import RECENT_STEPS
from meshwright.observe.rank_memory import peak_memory
from meshwright.planning.answer_json import candidate_json
from meshwright.planning.corrections import observe
from meshwright.planning.question import Candidate, estimate
from meshwright.strategy import Strategy
from meshwright.training.hooks import RETUNED, Hook, Metrics
from meshwright.training.loop import TrainingLoop
from meshwright.training.planned import predict, question_of, read_plan

GIB = 2.0**30
LEAST_STEPS = 20
"""Steps of a run from which something is learned."""
WARM = 5
"""Steps at the start that do not count: kernels are chosen and memory is reserved in them."""


class PlanFile(Hook):
    """Writes plan.json on the first rank, and compares at the end."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.expected: Candidate | None = None
        self.plain: Candidate | None = None
        """The same without what earlier runs have shown."""
        self.seconds: list[float] = []

    def at_start(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first or trainer.finished:
            return
        planned, config = trainer.planned, trainer.config
        question = question_of(planned.asked, trainer.world.size)
        held = read_plan(trainer.job.folder) or {}
        self.facts = {
            "schema": 1,
            "question": question,
            "strategy": planned.strategy,
            "micro_batch": planned.micro_batch,
            "expected": None,
            "measured": None,
            "answer": planned.answer,
            "tried": held.get("tried", []) if held.get("question") == question else [],
        }
        strategy = Strategy.parse(planned.strategy, trainer.world.size)
        try:
            plan = predict(config, strategy, planned.local or trainer.world.size)
        except UserError as error:
            self.facts["expected"] = {"unknown": str(error)}
        else:
            shown = plan.candidates[0]
            self.facts["expected"] = candidate_json(plan, shown)
            self.expected, self.plain = shown, estimate(plan.question, strategy, shown.micro_batch)
        self._write(trainer)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        # What is expected of a strategy that compresses is expected of its compressed steps.
        if metrics["step"] > trainer.one_step.whole_steps:
            self.seconds.append(metrics["step_s"])

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self.seconds.clear()

    def at_end(self, trainer: TrainingLoop) -> None:
        peak = float(trainer.world.gather(torch.tensor([peak_memory(trainer.world.device)], dtype=torch.float64)).max())
        counted = self.seconds[WARM:][-RECENT_STEPS:]
        if not trainer.world.is_first or len(counted) < LEAST_STEPS or trainer.stop_reason == RETUNED:
            return
        step_s = statistics.median(counted)
        self.facts["measured"] = {"step_time_s": step_s, "peak_gib": peak / GIB, "steps": len(counted)}
        if self.expected is not None and self.plain is not None:
            # Of what is written, so that the file agrees with itself.
            told_s = self.facts["expected"]["step_time_s"]
            off = {"step_time": step_s / told_s - 1, "peak": peak / self.expected.memory.peak - 1}
            self.facts["measured"]["beyond_expected"] = off
            try:
                observe(self.plain, step_s, peak)
            except OSError as error:
                _tell(f"what this run has shown is not kept for later plans: {error}")
        self._write(trainer)

    def _write(self, trainer: TrainingLoop) -> None:
        trainer.job.folder.check_generation()
        try:
            facts = trainer.job.folder.secrets.redact_tree(self.facts)
            write_atomically(trainer.job.folder.plan, json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            _tell(f"{trainer.job.folder.plan} cannot be written: {error.strerror}")


def _tell(text: str) -> None:
    """A plan is no reason to end a training."""
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
