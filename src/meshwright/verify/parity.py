"""Parity: a model under a strategy computes what it computes on one device.

A case trains a few optimizer steps on random tokens, with clipping and accumulation, through the very step that
training takes; its losses, gradient norms and final weights are compared with those of a single process that runs
the same micro-steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from meshwright.config import RunConfig
from meshwright.models.float8 import MULTIPLE
from meshwright.models.parts import whole
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep
from meshwright.verify.pool import RankPool

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}
"""Largest relative difference of losses; and, for the first three, of gradient norms."""

ROUNDED = 1e-5
"""The same in float64 of a model that rounds to float32 in places, by itself."""

SMALLEST = MULTIPLE
"""Smallest dimension of a linear that multiplies in 8 bits: shapes of proofs are small, and it is to be proved."""

END_TOKEN = 0
"""Ends a document, where `settings` mask documents."""


@dataclass(frozen=True)
class Case:
    """What is proved: a shape under a strategy in a precision."""

    spec: ModelSpec
    strategy: str
    ranks: int
    precision: str = "float64"
    micro_steps: int = 2
    steps: int = 3
    """The third is the first that depends on all that an optimizer remembers: of gradients, and of what it updated."""
    batch: int = 8
    tokens: int = 16
    seed: int = 1
    settings: dict[str, dict[str, object]] = field(default_factory=dict, hash=False)
    """Further settings by section, such as {"train": {"grad_clip": 0.0}}."""


@dataclass
class Trace:
    """What a case computed."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def step_of(world: World, case: Case) -> TrainingStep:
    """The training step of a case on this rank."""
    strategy = Strategy.parse(case.strategy, world.size)
    if case.batch % (case.micro_steps * strategy.all_shares):
        raise ValueError(
            f"a batch of {case.batch} is not divisible by {case.micro_steps} micro-steps x {strategy.all_shares} shares"
        )
    strategy.check(case.spec, world.size, case.tokens)
    return TrainingStep(_config(case), case.spec, strategy, world, end_token=END_TOKEN)


def run_case(world: World, case: Case) -> Trace:
    """Train a case on this rank; the weights are given by the first of the ranks that hold the same ones."""
    step = step_of(world, case)
    trace = Trace([], [], {})
    for number in range(case.steps):
        metrics = step(number, batch_of(case, number, step.data_rank, step.strategy))
        trace.losses.append(metrics.get("loss", float("nan")))
        trace.norms.append(metrics.get("grad_norm", float("nan")))
    weights = {name: whole(parameter.detach()) for name, parameter in step.model.named_parameters()}
    if step.parallel.is_first_of_stage:
        weights |= dict(step.model.named_buffers())
        trace.weights = {name: value.to("cpu", copy=True) for name, value in weights.items()}
    return trace


def _config(case: Case) -> RunConfig:
    train = {"precision": case.precision, "lr": 1e-2, "grad_clip": 0.5, "steps": case.steps, "schedule": "constant"}
    sections = {name: dict(values) for name, values in case.settings.items()}
    narrow = {"fp8_smallest": SMALLEST} | sections.get("precision", {})
    return RunConfig.model_validate(
        {
            **sections,
            "run": {"seed": case.seed},
            "train": train | sections.get("train", {}),
            "precision": narrow,
            # In a proof, numbers that are no numbers are the result.
            "elastic": {"nonfinite": "stop"} | sections.get("elastic", {}),
        },
        strict=False,
    )


def batch_of(case: Case, number: int, data_rank: int, strategy: Strategy) -> dict[str, Tensor]:
    """This rank's share of a step's samples, which do not depend on the number of ranks."""
    draw = np.random.default_rng((case.seed, number))
    shape = (case.micro_steps, case.batch // case.micro_steps, case.tokens + 1)
    tokens = draw.integers(case.spec.vocab_size, size=shape)
    tokens[:, :, -3:] = np.where(draw.random(tokens[:, :, -3:].shape) < 0.3, -100, tokens[:, :, -3:])
    tokens[:, :, :-1] = np.where(tokens[:, :, :-1] < 0, 0, tokens[:, :, :-1])
    samples = np.arange(case.batch).reshape(case.micro_steps, -1) + number * case.batch
    mine = strategy.own_samples(data_rank, case.batch // case.micro_steps)
    return {"tokens": torch.from_numpy(tokens[:, mine].copy()), "samples": torch.from_numpy(samples[:, mine].copy())}


class Prover:
    """Compares cases with a single process; remembers what that computed."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool
        self._references: dict[str, Trace] = {}

    def reference(self, case: Case) -> Trace:
        """What one process computes."""
        alone = replace(case, strategy="auto", ranks=1)
        key = repr(alone)
        if key not in self._references:
            (self._references[key],) = self.pool.run(run_case, 1, alone)
        return self._references[key]

    def differences(
        self, case: Case, tolerance: float | None = None, run: Callable[[World, Case], Trace] = run_case
    ) -> list[str]:
        """Where a case differs from the single process by more than its precision allows; nothing when it agrees.

        The ranks run it by `run`.
        """
        expected = self.reference(case)
        traces = self.pool.run(run, case.ranks, case)
        bound = TOLERANCES[case.precision] if tolerance is None else tolerance
        found = []
        for rank, trace in enumerate(traces):
            found += _unlike(f"rank {rank}: loss", trace.losses, expected.losses, bound)
            if case.precision in ("float64", "float32", "tf32"):
                found += _unlike(f"rank {rank}: gradient norm", trace.norms, expected.norms, bound)
        if case.precision == "float64":
            weights = {name: value for trace in traces for name, value in trace.weights.items()}
            found += _unlike_weights(weights, expected.weights, bound)
        return found


def _unlike(name: str, found: list[float], expected: list[float], bound: float) -> list[str]:
    return [
        f"{name} of step {step + 1} is {ours!r}, not {theirs!r}"
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if not abs(ours - theirs) <= bound * abs(theirs)
    ]


def _unlike_weights(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> list[str]:
    if found.keys() != expected.keys():
        return [f"weights have other names: {sorted(found.keys() ^ expected.keys())}"]
    unlike = []
    for name, weight in expected.items():
        difference = float((found[name] - weight).abs().max())
        if not difference <= bound * max(1.0, float(weight.abs().max())):
            unlike.append(f"{name} differs by {difference:.2e}")
    return unlike
