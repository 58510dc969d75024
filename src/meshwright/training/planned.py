"""Which strategy a run takes on the ranks that it has: the one that its configuration names, or the planner's choice.

`auto` asks the planner, with constraints where some follow (`auto tp<=2 zero=3`). What it chose is in the run folder's
plan.json, and a run that goes on with the same question takes the same answer. A strategy that is named stays as it is
while the ranks allow it; where they no longer do, the nearest legal one is taken, or the planner's choice if that one
would not fit or would be slower. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.cluster.cluster import Cluster, cpu_ranks, parse_cluster, this_machine, with_calibration
from meshwright.config import RunConfig
from meshwright.errors import ConfigError, UserError
from meshwright.estimate.kept import Kept
from meshwright.models.spec import ModelSpec
from meshwright.planning.replan import SPLITS, replan
from meshwright.strategy import AUTO, Strategy
from meshwright.training.job import batch_schedule, model_spec
from meshwright.training.leeway import check_leeway, limits_of, travel_limits, whence
from meshwright.training.run_folder import RunFolder
from meshwright.training.travel import check_asked, travel_of

if TYPE_CHECKING:
    from meshwright.parallel.world import World
    from meshwright.planning.made import Plan
    from meshwright.planning.question import Candidate

FASTER = 0.05
"""Share of a step that the planner's choice must save to be taken instead of the nearest legal strategy."""


class NothingFits(ConfigError):
    """The planner found no strategy that fits."""


@dataclass(frozen=True)
class Planned:
    """A run's strategy on some ranks."""

    config: RunConfig
    """With the strategy and the micro-batch to run."""
    asked: RunConfig
    world: int
    local: int = 0
    """Ranks of each machine; 0 stands for all of them on one."""
    said: tuple[str, ...] = ()
    """What to tell the user about the choice."""
    answer: dict[str, Any] | None = None
    """The planner's, as plan.json has it; None where it was not asked."""

    @property
    def strategy(self) -> str:
        """In its short form."""
        return self.config.parallel.strategy

    @property
    def micro_batch(self) -> int | None:
        """Samples of a pass; None is a rank's whole share."""
        return self.config.train.micro_batch


def asks_planner(config: RunConfig) -> bool:
    """Whether the strategy is left to the planner."""
    return config.parallel.strategy.split()[:1] == [AUTO]


def plan_run(config: RunConfig, world: int, local: int | None = None) -> Planned:
    """The strategy for exactly that many ranks, `local` of them on each machine."""
    check_asked(config)
    here = local or world
    if not asks_planner(config):
        # One that was changed by parallel.retune stays so.
        kept = _kept(config, world, here) if config.parallel.retune else None
        return kept or Planned(config, config, world, here)
    return _kept(config, world, here) or _ask(config, world, here)


def plan_ranks(config: RunConfig, ranks: int, local: int) -> Planned:
    """The strategy for at most that many ranks: those that cannot share the batch or the model stay idle."""
    check_asked(config)
    if not asks_planner(config):
        kept = _kept(config, ranks, local) if config.parallel.retune else None
        return kept or _nearest(config, ranks, local)
    refused: UserError | None = None
    for world in range(ranks, 0, -1):
        try:
            found = plan_run(config, world, local)
        except NothingFits:
            raise
        except UserError as error:
            refused = refused or error
            continue
        idle = f"{ranks - world} of {ranks} ranks stay idle, since they cannot share the batch or the model evenly"
        return found if world == ranks else replace(found, said=(*found.said, idle))
    assert refused is not None
    raise refused


def agree(config: RunConfig, world: World) -> Planned:
    """The same for the ranks of a launcher's job: the first one asks, the others take its answer."""
    check_asked(config)
    if not asks_planner(config) and not config.parallel.retune:
        return Planned(config, config, world.size, world.local)
    found = plan_run(config, world.size, world.local) if world.is_first else None
    mine = [found.strategy, found.micro_batch] if found is not None else None
    strategy, micro_batch = world.exchange(mine)[0]
    return found or Planned(with_choice(config, strategy, micro_batch), config, world.size, world.local)


def with_choice(config: RunConfig, strategy: str, micro_batch: int | None, placement: str | None = None) -> RunConfig:
    """A configuration with another strategy and micro-batch, and perhaps another order of axes."""
    parallel = {"strategy": strategy} | ({} if placement is None else {"placement": placement})
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update={"micro_batch": micro_batch}),
        }
    )


def machines_of(config: RunConfig, world: int, local: int) -> Cluster:
    """Machines that the ranks are on: parallel.cluster, else ones like this; a UserError if the chip is unknown."""
    if config.run.device == "cuda-shared":
        # Neither what it would say of times nor what a run would teach it holds where ranks share a chip.
        raise UserError("run.device=cuda-shared: plans are made for ranks with a GPU each; name a parallel.strategy")
    if config.parallel.cluster is not None:
        return parse_cluster(config.parallel.cluster).with_gpus(world)
    here = cpu_ranks(local) if config.run.device == "cpu" else with_calibration(this_machine())
    if here.chip.key == "cpu":
        here = cpu_ranks(min(local, world))
    return here.with_gpus(world)


def predict(config: RunConfig, strategy: Strategy, local: int) -> Plan:
    """What the planner expects of a strategy with the configuration's batch and the micro-batch that a run takes."""
    from meshwright.planning.answer import plan

    machines = machines_of(config, strategy.world, local)
    settings = _settings(config, machines)
    batch = settings["global_batch"]
    micro_steps = strategy.micro_steps(batch, config.train.micro_batch)
    return plan(
        model_spec(config),
        machines,
        **settings,
        strategy=str(strategy),
        micro_batch=batch // strategy.all_shares // micro_steps,
    )


def question_of(config: RunConfig, world: int) -> dict[str, Any]:
    """What a choice depends on: an answer holds as long as this is the same."""
    spec = json.dumps(model_spec(config).model_dump(mode="json"), sort_keys=True)
    return {
        "strategy": config.parallel.strategy,
        "cluster": config.parallel.cluster,
        "device": config.run.device,
        "ranks": world,
        "model": hashlib.sha256(spec.encode()).hexdigest(),
        "sequence_length": config.data.sequence_length,
        "batches": sorted(set(batch_schedule(config).sizes())),
        "micro_batch": config.train.micro_batch,
        "precision": config.train.precision,
        "optimizer": config.train.optimizer,
        **({"limits": limits} if (limits := _words_of(travel_limits(config))) else {}),
        **({"kept": kept} if (kept := str(_kept_states(config))) else {}),
        **({"compile": "off"} if config.train.compile == "off" else {}),
    }


def _kept_states(config: RunConfig) -> Kept:
    return Kept.of(config.precision.stored, config.precision.moments)


def read_plan(folder: RunFolder) -> dict[str, Any] | None:
    """The run folder's plan.json; None where there is none that can be read."""
    try:
        held = json.loads(folder.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held if isinstance(held, dict) else None


def _kept(config: RunConfig, world: int, local: int) -> Planned | None:
    """The choice that the run was started with, if it is asked the same again."""
    held = None if config.run.fresh else read_plan(RunFolder(config.run.dir))
    if held is None or held.get("question") != question_of(config, world):
        return None
    try:
        chosen = with_choice(config, str(held["strategy"]), held["micro_batch"])
        check_run(chosen, model_spec(config), world)
    except (ConfigError, KeyError, TypeError):
        return None
    said = f"{config.parallel.strategy}: {held['strategy']}, as this run's plan.json has it"
    return Planned(chosen, config, world, local, (said,), held.get("answer"))


def check_run(config: RunConfig, spec: ModelSpec, world: int) -> None:
    """Raise unless the trainer takes the strategy and every batch divides."""
    strategy = Strategy.parse(config.parallel.strategy, world)
    strategy.check(spec, world, config.data.sequence_length, config.train.optimizer)
    check_leeway(config, strategy)
    for size in batch_schedule(config).sizes():
        strategy.micro_steps(size, config.train.micro_batch)


def _settings(config: RunConfig, machines: Cluster) -> dict[str, Any]:
    """What a plan is made for: the largest batch, in the precision of the run."""
    precision: str = "float32" if config.train.precision == "float64" else config.train.precision
    # Where it runs all the same, such chips do it by way of wider products.
    wider = {"fp8": "bf16", "tf32": "float32"}
    if any(precision not in group.chip.tflops for group in machines.kinds):
        precision = wider.get(precision, precision)
    return {
        "sequence_length": config.data.sequence_length,
        "global_batch": max(batch_schedule(config).sizes()),
        "precision": precision,
        "stored": config.precision.stored,
        "moments": config.precision.moments,
        "compile": config.train.compile != "off",
    }


def constraints_of(config: RunConfig) -> list[str]:
    """What the settings leave to choose."""
    asked = config.parallel.strategy.split()[1:] if asks_planner(config) else []
    return [*asked, *_words_of(limits_of(config))]


def _words_of(limits: dict[str, list[str]]) -> list[str]:
    return [word for words in limits.values() for word in words]


def does_run(config: RunConfig, strategy: str, micro_batch: int, world: int) -> bool:
    """Whether a run with these settings takes a strategy."""
    try:
        check_run(with_choice(config, strategy, micro_batch), model_spec(config), world)
    except ConfigError:
        return False
    return True


def _ask(config: RunConfig, world: int, local: int) -> Planned:
    """The planner's choice; plain data parallel where it does not know the machines."""
    spec = model_spec(config)
    try:
        machines = machines_of(config, world, local)
    except UserError as error:
        if config.parallel.cluster is not None or config.parallel.strategy != AUTO:
            raise
        chosen = with_choice(config, f"dp={world}", config.train.micro_batch)
        check_run(chosen, spec, world)
        return Planned(chosen, config, world, local, (f"auto: dp={world}; nothing was planned, since {error}",))
    from meshwright.planning.answer import plan

    limits = limits_of(config)
    try:
        made = plan(
            spec,
            machines,
            **_settings(config, machines),
            constraints=constraints_of(config),
            batches=batch_schedule(config).sizes(),
            all_chips=True,
        )
    except UserError as error:
        raise UserError(f"{error} ({whence(limits)})" if limits else str(error)) from None
    if made.best is None:
        from meshwright.planning.narrow import in_words

        nearest = made.shown
        raise NothingFits(
            f"parallel.strategy='{config.parallel.strategy}': nothing is expected to fit on {machines}; the nearest is "
            f"'{nearest.strategy}' with train.micro_batch={nearest.micro_batch}, which needs "
            f"{_gib(nearest.memory.peak)} of {_gib(nearest.memory.capacity)} GiB. Use more ranks, a shorter "
            "data.sequence_length or a smaller model, or name that strategy to try it all the same"
            + (f"; {in_words(made.narrower, None)}" if made.narrower is not None else "")
            + (f" ({whence(limits)})" if limits else "")
        )
    chosen = with_choice(config, str(made.best.strategy), made.best.micro_batch)
    check_run(chosen, spec, world)
    return Planned(chosen, config, world, local, tuple(_words(config, made)), made.as_json())


def _words(config: RunConfig, made: Plan) -> Iterator[str]:
    """The choice in three lines: what, where its time goes, what comes next."""
    from meshwright.planning.explain import time_goes_into
    from meshwright.planning.origin import origin
    from meshwright.planning.runners import loss

    best = made.best
    assert best is not None
    tokens = best.tokens_per_s_per_gpu * best.scenario.cluster.gpus
    yield (
        f"{config.parallel.strategy}: {best.strategy}, micro-batch {best.micro_batch} on {made.question.cluster}: "
        f"{best.step_s:.3g} s a step, {tokens:,.0f} tokens/s, {_gib(best.memory.peak)} of "
        f"{_gib(best.memory.capacity)} GiB at the peak"
    )
    known = "measured in an earlier run here" if best.origin == "measured" else origin(made.question)
    yield f"{time_goes_into(best)} ({known})"
    others = [one for one in made.candidates if one.strategy != best.strategy]
    if others:
        yield f"next comes {others[0].strategy}: {loss(best, others[0])}"
    else:
        yield "no other family of strategies fits these ranks"


def _nearest(config: RunConfig, ranks: int, local: int) -> Planned:
    """What is asked for as far as the ranks allow, or the planner's choice where that is better."""
    spec = model_spec(config)
    found = replan(
        config.parallel.strategy,
        spec,
        ranks,
        batch_schedule(config).sizes(),
        micro_batch=config.train.micro_batch,
        sequence_length=config.data.sequence_length,
        optimizer=config.train.optimizer,
        check=partial(travel_of, config),
    )
    chosen = with_choice(config, str(found.strategy), config.train.micro_batch)
    said = (found.change,) if found.change is not None else ()
    near = Planned(chosen, config, found.strategy.world, local, said)
    if found.change is None:
        return near
    try:
        expected = predict(chosen, found.strategy, local).candidates[0]
    except UserError:
        return near  # The planner does not know these machines.
    asked = Strategy.parse(
        config.parallel.strategy,
        Strategy.processes(config.parallel.strategy) or Strategy.fewest_processes(config.parallel.strategy),
    )
    split = any(getattr(asked, key) != getattr(found.strategy, key) for key in SPLITS)
    if expected.fits and not split:
        return near
    try:
        other = plan_ranks(with_choice(config, AUTO, config.train.micro_batch), ranks, local)
        better = predict(other.config, Strategy.parse(other.strategy, other.world), local).candidates[0]
    except UserError:
        return near
    why = _reason(expected, better)
    if why is None:
        return near
    return replace(other, asked=config, said=(f"{found.strategy} {why}", *other.said))


def _reason(near: Candidate, better: Candidate) -> str | None:
    """Why another strategy is taken than the nearest, if it is."""
    if not near.fits and better.fits:
        return f"would need {_gib(near.memory.peak)} of {_gib(near.memory.capacity)} GiB"
    if better.fits and better.step_s < near.step_s * (1 - FASTER):
        return f"would take {near.step_s / better.step_s - 1:.0%} longer a step"
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
