"""A run that changes its strategy: at checkpoints it measures itself, and starts its ranks anew where a change pays.

The choice goes into plan.json, from where the ranks that are started next take it; the launcher sees to that.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.comm.compression import NONE
from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.parallel.world import World
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.retune import LARGE, SMALL, Seen, Switch, better
from meshwright.training.hooks import RETUNED, Hook, Metrics
from meshwright.training.job import batch_schedule
from meshwright.training.loop import TrainingLoop
from meshwright.training.planned import constraints_of, does_run, predict, read_plan

LEAST_STEPS = 8
"""Steps that are measured before a change is thought of; those before them do not count."""
WARM = 2
PROBE_S = 0.15
"""Seconds of matrix products that show how fast a rank is."""


class Retune(Hook):
    """Measures at checkpoints, and asks for other ranks where they would be faster."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.given_up = False

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.fence is None:
            self.given_up = True
            if trainer.world.is_first:
                print("plan   parallel.retune does nothing: nobody here would start the ranks anew", flush=True)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if metrics["step"] == trainer.one_step.whole_steps + 1:
            # Compression begins: these are other steps.
            self.seconds.clear()
        self.seconds.append(metrics["step_s"])
        every = trainer.config.checkpoint.every
        if self.given_up or trainer.finished or trainer.stopping or not every or trainer.step % every:
            return
        if len(self.seconds) < WARM + LEAST_STEPS:
            return
        seen = measure(trainer.world, statistics.median(self.seconds[WARM:]))
        switch = self._decide(trainer, seen) if trainer.world.is_first else None
        if any(trainer.world.exchange(switch is not None)):
            trainer.preempted = True
            trainer.stop(RETUNED, everywhere=True)

    def _decide(self, trainer: TrainingLoop, seen: Seen) -> Switch | None:
        """The first rank's decision, written down."""
        folder, strategy, asked = trainer.job.folder, trainer.job.strategy, trainer.planned.asked
        # What was seen of steps that go whole is not of compressed ones.
        now = replace(strategy, compress=NONE) if trainer.step <= trainer.one_step.whole_steps else strategy
        held = read_plan(folder) or {}
        if held.get("strategy") != trainer.planned.strategy:
            self.given_up = True  # Someone else writes there.
            return None
        try:
            plan = predict(trainer.config, strategy, trainer.planned.local or trainer.world.size)
            micro_batch = plan.candidates[0].micro_batch
            question = replace(
                plan.question,
                constraints=parse_constraints(constraints_of(asked)),
                batches=tuple(batch_schedule(asked).sizes()),
            )
            # Settings may have changed since something was tried; and what runs now is not to be gone back to.
            tried = {
                key: step_s
                for key, step_s in tried_before(held).items()
                if key != (str(strategy), micro_batch) and does_run(asked, *key, trainer.world.size)
            }
            switch = better(question, now, micro_batch, seen, tried)
        except UserError as error:
            self.given_up = True
            folder.event("retune_impossible", step=trainer.step, reason=str(error))
            return None
        if switch is None or not does_run(asked, str(switch.strategy), switch.micro_batch, trainer.world.size):
            return None
        # As it was asked for, so that a way back compresses again.
        tried[str(strategy), micro_batch] = seen.step_s
        held["tried"] = [[*key, step_s] for key, step_s in tried.items()]
        held |= {"strategy": str(switch.strategy), "micro_batch": switch.micro_batch}
        folder.check_generation()
        try:
            write_atomically(folder.plan, json.dumps(held, indent=1) + "\n")
        except OSError as error:
            print(f"plan   {switch}; but {folder.plan} cannot be written: {error.strerror}", flush=True)
            return None
        folder.event(
            "retuned",
            step=trainer.step,
            was=str(strategy),
            strategy=str(switch.strategy),
            micro_batch=switch.micro_batch,
            step_s=switch.now_s,
            expected_s=switch.expected_s,
            why=switch.why,
        )
        print(f"plan   {switch}", flush=True)
        return switch


def tried_before(held: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Strategies and micro-batches that the run had, with their measured steps; none where the file is damaged."""
    try:
        tried = {(str(text), int(size)): float(step_s) for text, size, step_s in held.get("tried", [])}
    except (TypeError, ValueError, OverflowError):
        return {}
    return {key: step_s for key, step_s in tried.items() if 0 < step_s < math.inf}


def measure(world: World, step_s: float) -> Seen:
    """How fast each rank computes and how fast all of them sum, now."""
    compute = world.gather(torch.tensor([_compute(world.device)], dtype=torch.float64, device=world.device))
    # Once for both, so that nobody waits for a rank that still computes.
    world.sum(torch.zeros(1, device=world.device))
    small, large = (_sum_s(world, size) for size in (SMALL, LARGE))
    sums = world.gather(torch.tensor([small, large], dtype=torch.float64, device=world.device))
    # The last to come does not wait: its time is that of the sum.
    least = sums.min(dim=0).values
    return Seen(step_s, compute.flatten().tolist(), float(least[0]), float(least[1]))


def _compute(device: torch.device) -> float:
    """Seconds of a matrix product, over long enough that a rank which is held up now and then shows."""
    size = 192 if device.type == "cpu" else 2048
    left = torch.randn(size, size, device=device)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < PROBE_S:
        (left @ left).sum().item()
        count += 1
    return (time.perf_counter() - started) / count


def _sum_s(world: World, size: int) -> float:
    """Seconds of a sum over all ranks: the median of some."""
    values = torch.zeros(size // 4, device=world.device)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        world.sum(values)
        if values.device.type == "cuda":
            torch.cuda.synchronize(values.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
