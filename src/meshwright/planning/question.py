"""What to plan for, and a candidate for an answer: a strategy with what is estimated of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, log, sqrt
from typing import Protocol

from meshwright.cluster.cluster import Cluster
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.estimate.state import state_bytes
from meshwright.estimate.units import Place
from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.constraints import Constraint
from meshwright.planning.corrections import Learned, corrected
from meshwright.planning.group_times import memory_on, timer_on
from meshwright.planning.memory import Memory
from meshwright.planning.placement import with_paths
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants, Software, constants, keeping
from meshwright.planning.state_memory import unsent_bytes
from meshwright.planning.timing import Parts
from meshwright.strategy import Strategy

FEATURE = 0.01
"""What a feature must earn, as a share of the step: distribution is a cost."""
ROUTING_SPREAD = 0.15
"""Standard deviation of an expert's load around the mean, under a balancing loss."""


class Only(Protocol):
    """A limit that hangs on several parts of a strategy at once, such as what the file of another trainer can hold."""

    @property
    def words(self) -> tuple[str, ...]:
        """What of it can be said as constraints."""

    def check(self, question: Question) -> None:
        """Raise a UserError where it takes no strategy at all."""

    def takes(self, question: Question, layout: Layout) -> bool:
        """Whether it takes that one."""


@dataclass(frozen=True)
class Question:
    """What to plan for."""

    spec: ModelSpec
    cluster: Cluster
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    constraints: tuple[Constraint, ...] = ()
    kept: Kept = FLOAT32
    """How weights, gradients and moments are kept."""
    compile: bool = True
    """Whether layers are compiled on GPUs."""
    software: str = "meshwright"
    batches: tuple[int, ...] = ()
    """Other global batches that the ranks must be able to share."""
    all_chips: bool = False
    """Whether all machines must work, also those of a slow kind."""
    left_out: frozenset[tuple[str, int]] = frozenset()
    """Strategies and micro-batches that are not searched, because more is known of them than an estimate."""
    only: Only | None = field(default=None, compare=False, repr=False)
    """What else limits the strategies."""
    learned: Learned = field(default_factory=Learned, compare=False, repr=False)
    """What runs on such machines have shown."""
    known: Constants = field(default_factory=constants, compare=False, repr=False)

    @cached_property
    def trainer(self) -> Software:
        """The software, with what it keeps of each parameter."""
        return keeping(self.known.software[self.software], self.kept)

    @cached_property
    def shared(self) -> int:
        """What data ranks and micro-batches must divide: all global batches."""
        return gcd(self.global_batch, *self.batches)

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        return count_parameters(self.spec).total

    def allows(self, **found: int | str) -> bool:
        """Whether a choice meets the constraints so far."""
        return all(one.holds(found) for one in self.constraints)

    def takes(self, layout: Layout) -> bool:
        """Whether a choice, which may be without recompute yet, is one that whoever asked can use."""
        return self.only is None or self.only.takes(self, layout)

    def leaves_out(self, layout: Layout, micro_batch: int) -> bool:
        """Whether a choice is not searched."""
        return bool(self.left_out) and (str(layout.strategy()), micro_batch) in self.left_out

    def scenario(self, strategy: Strategy | Layout, micro_batch: int) -> Scenario:
        """A strategy as a scenario."""
        return Scenario(
            spec=self.spec,
            layout=strategy if isinstance(strategy, Layout) else Layout.of(strategy),
            cluster=self.cluster,
            software=self.trainer,
            sequence_length=self.sequence_length,
            micro_batch=micro_batch,
            global_batch=self.global_batch,
            precision=self.precision,
            imbalance=routing_imbalance(self.spec, strategy.ep),
            kept=self.kept,
            compile=self.compile,
        )


def routing_imbalance(spec: ModelSpec, ep: int) -> float:
    """How much more rows the busiest expert-parallel rank gets than the mean: the expected maximum of normal loads."""
    if spec.experts is None or ep == 1:
        return 1.0
    per_rank = spec.experts.num_experts / ep
    return 1.0 + ROUTING_SPREAD / sqrt(per_rank) * sqrt(2 * log(ep))


@dataclass(frozen=True)
class Candidate:
    """A strategy, and what is estimated of it."""

    strategy: Strategy
    micro_batch: int
    scenario: Scenario = field(repr=False, compare=False)
    memory: Memory = field(repr=False, compare=False)
    parts: Parts = field(repr=False, compare=False)
    origin: str = field(default="estimated", compare=False)
    """Where its figures come from: estimated, calibrated (by this machine's speeds, or by other runs), measured."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total

    def same_choice(self, other: Candidate) -> bool:
        """Whether it is the same strategy with the same micro-batch, whatever is known of it."""
        return (self.strategy, self.micro_batch) == (other.strategy, other.micro_batch)

    @property
    def fits(self) -> bool:
        """Whether it fits with a margin."""
        return self.memory.verdict == "fits"

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second and chip."""
        scenario = self.scenario
        return scenario.global_batch * scenario.sequence_length / self.step_s / scenario.cluster.gpus

    @property
    def mfu(self) -> float:
        """Share of the chips' peak (of 16-bit products) that the model's own FLOPs make up."""
        scenario = self.scenario
        tokens = scenario.global_batch * scenario.sequence_length
        flops = blocks.training_flops(scenario.spec, tokens, scenario.sequence_length)
        return flops / self.step_s / scenario.cluster.gpus / scenario.cluster.mean_peak(scenario.wide)

    @cached_property
    def features(self) -> int:
        """How many features it uses, beyond copies of the model."""
        return count_features(self.strategy)

    def score(self, objective: str) -> tuple[float, ...]:
        """Lower is better; ties go to what is simpler, and then to one order for all time."""
        strategy = self.strategy
        order = (self.features, strategy.zero, strategy.tp, strategy.pp, strategy.cp, strategy.ep, -self.micro_batch)
        if objective == "memory":
            return (self.memory.peak, self.step_s, *order)
        time = self.step_s * (1 + FEATURE * self.features)
        return (time * self.scenario.cluster.hourly if objective == "cost" else time, *order)


@dataclass
class Found:
    """What a search found."""

    best: Candidate | None
    ranked: list[Candidate]
    """All that were estimated and fit, best first."""
    nearest: Candidate | None
    """Where nothing fits, what comes closest."""
    estimated: int
    bounded: int
    """Degrees that were left out because of their bound."""
    ways: dict[str, Candidate | None] = field(default_factory=dict)
    """On machines of several kinds, the best of each way to use them."""


def count_features(strategy: Strategy | Layout) -> int:
    """Features that a strategy uses."""
    used = [strategy.zero > 0, strategy.tp > 1, strategy.pp > 1, strategy.cp > 1, strategy.ep > 1]
    used += [strategy.schedule != "1f1b", strategy.layers != "even", strategy.recompute != "none"]
    used += [strategy.shares != "even", strategy.compress != "none"]
    # What goes to host memory must earn twice as much: whether it has room there is known less well.
    used += 2 * [strategy.host_states != "none", strategy.host_activations]
    used += [strategy.zero > 0 and strategy.replicate > 1]
    return sum(used)


def estimate(question: Question, strategy: Strategy, micro_batch: int) -> Candidate:
    """One strategy, whether it fits or not."""
    scenario = question.scenario(strategy, micro_batch)
    measured = all(group.speeds is not None for group in question.cluster.kinds)
    origin = "calibrated" if measured else "estimated"
    memory, parts = memory_on(scenario), timer_on(scenario, question.known).parts()
    return with_paths(Candidate(strategy, micro_batch, scenario, memory, parts, origin))


def in_full(question: Question, candidate: Candidate) -> Candidate:
    """A candidate of a search with the memory of all its pipeline ranks and its time, and what was learned."""
    # It may be one of a part of the machines.
    own = replace(question, cluster=candidate.scenario.cluster)
    exact = with_exact_states(estimate(own, candidate.strategy, candidate.micro_batch))
    return corrected(exact, question.learned)


def with_exact_states(candidate: Candidate) -> Candidate:
    """The same with parameters and optimizer state of each rank to the byte, as `estimate` has them.

    A search sums what layers hold; shards are padded to whole rows, which this adds.
    """
    scenario, strategy = candidate.scenario, candidate.strategy
    if scenario.software.name != "meshwright" or strategy.host_states != "none" or scenario.spec.latent_attention:
        return candidate
    if strategy.wrap not in ("auto", "block"):
        # Which units there are follows from the modules of a model that is built.
        return candidate
    stages = []
    for rank, terms in enumerate(candidate.memory.stages):
        exact = state_bytes(scenario.spec, strategy, Place(pp=rank), kept=scenario.kept)
        optimizer = exact.optimizer + unsent_bytes(scenario, exact.parameters / scenario.held_bytes[0])
        stages.append(replace(terms, parameters=float(exact.parameters), optimizer=float(optimizer)))
    return replace(candidate, memory=replace(candidate.memory, stages=tuple(stages)))
