"""One side of a proof: a model trained for a few steps on this rank, and a record of what came out.

A decoder goes through the trainer's own step, a user's module through a loop of its own. Records hold plain arrays and
say where in the whole they lie, so that nothing has to be gathered: who compares has the records of all ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec
from meshwright.parallel.parallelize import check_model
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingError
from meshwright.verify.narrowing import Narrowing
from meshwright.verify.own_module import OwnLoop, find
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.record import Part, Recorder, StepTrace, held, place_of

CLIP = 0.5


@dataclass(frozen=True)
class Trial:
    """What is trained: a shape or a user's `module:build`, under a strategy, for a few steps."""

    subject: ModelSpec | str
    strategy: Strategy
    precision: str
    steps: int
    samples: int
    micro_steps: int
    tokens: int
    seed: int = 1
    trace_step: int | None = None
    """The step of which everything is recorded."""


@dataclass
class Record:
    """What a trial computed on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Part] = field(default_factory=dict)
    """Parameters and buffers after the last step: what this rank holds of them."""
    trace: StepTrace | None = None
    narrowing: str = ""
    """Where a model in float64 rounds to fewer digits by itself, in words."""


@dataclass(frozen=True)
class Refusal:
    """What a user can change, in words: an error of one rank that is raised where the command runs."""

    message: str


def survey(world: World, place: str, strategy: Strategy, tokens: int) -> int | Refusal:
    """How many parameters a user's module has; refuses what cannot be proved."""
    try:
        source = find(place, tokens)
        model = source.build()
        check_model(model, strategy, strategy.world)
    except UserError as error:
        return Refusal(str(error))
    return sum(parameter.numel() for parameter in model.parameters())


def run_trial(world: World, trial: Trial) -> Record | Refusal:
    """Train on this rank and record."""
    # Of torch's own making; who reads a proof can do nothing about them.
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    try:
        return _run(world, trial)
    except TrainingError:
        # Numbers that are no longer numbers are a result, and not for the user to change.
        raise
    except UserError as error:
        return Refusal(str(error))


def _run(world: World, trial: Trial) -> Record:
    torch.manual_seed(trial.seed)
    engine = _DecoderLoop(world, trial) if isinstance(trial.subject, ModelSpec) else _own_loop(world, trial)
    recorder = Recorder(engine.model, engine.parallel.pipeline) if trial.trace_step is not None else None
    if recorder is not None:
        engine.optimizer.register_step_pre_hook(lambda *_: recorder.take_gradients(engine.model))
    record = Record()
    for number in range(trial.steps):
        if recorder is not None:
            recorder.active = number == trial.trace_step
        if number == 0 and trial.precision == "float64" and trial.strategy.world == 1:
            with Narrowing(engine.model) as narrowing:
                loss, norm = engine(number)
            record.narrowing = narrowing.found
        else:
            loss, norm = engine(number)
        record.losses.append(loss)
        record.norms.append(norm)
    record.weights = held(engine.model)
    if recorder is not None:
        # As they were before clipping, which is a matter of the norm.
        clipped = min(1.0, CLIP / (record.norms[-1] + 1e-6))
        record.trace = recorder.trace(place_of(engine.parallel), clipped)
    return record


class _DecoderLoop:
    """The trainer's own step, fed with random tokens."""

    def __init__(self, world: World, trial: Trial) -> None:
        assert isinstance(trial.subject, ModelSpec)
        self.case = Case(
            trial.subject,
            str(trial.strategy),
            world.size,
            trial.precision,
            trial.micro_steps,
            trial.steps,
            trial.samples,
            trial.tokens,
            trial.seed,
            {"train": {"grad_clip": CLIP}},
        )
        self.step = step_of(world, self.case)
        self.model: nn.Module = self.step.model
        self.parallel = self.step.parallel
        self.optimizer = self.step.optimizer

    def __call__(self, number: int) -> tuple[float, float]:
        batch = batch_of(self.case, number, self.step.data_rank, self.step.strategy)
        metrics = self.step(number, batch)
        return metrics.get("loss", float("nan")), metrics.get("grad_norm", float("nan"))


def _own_loop(world: World, trial: Trial) -> OwnLoop:
    assert isinstance(trial.subject, str)
    return OwnLoop(
        world,
        trial.subject,
        trial.strategy,
        precision=trial.precision,
        samples=trial.samples,
        micro_steps=trial.micro_steps,
        tokens=trial.tokens,
        clip=CLIP,
        seed=trial.seed,
    )
