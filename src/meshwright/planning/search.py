"""Search: the strategy that is best for a model on a cluster, among all that the trainer can run. No torch.

Degrees and the micro-batch are taken in the order of a bound below which no choice of the rest can bring the step; when
the bound of the next is not below the best so far, nothing better is left, and the search ends. The rest is searched in
full: ZeRO stage, copies, schedule, layer split, recompute, offload. Of recompute=first:N only the least N that fits can
be best, since each further layer costs time and saves memory. What a search covers is in `Space`.

Distribution is a cost: a feature must earn half a percent, or the choice without it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, sqrt
from math import log as ln

from meshwright.cluster.cluster import Cluster
from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.constraints import Constraint
from meshwright.planning.memory import Memory, memory_of
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants, constants
from meshwright.planning.timing import Parts, Timer
from meshwright.strategy import Strategy
from meshwright.strategy_fit import divisors

FEATURE = 0.005
"""What a feature must earn, as a share of the step."""
OBJECTIVES = ("throughput", "memory", "cost", "fewest-gpus")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ROUTING_SPREAD = 0.15
"""Standard deviation of an expert's load around the mean, under a balancing loss."""


@dataclass(frozen=True)
class Question:
    """What to plan for."""

    spec: ModelSpec
    cluster: Cluster
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    constraints: tuple[Constraint, ...] = ()
    software: str = "meshwright"
    known: Constants = field(default_factory=constants, compare=False, repr=False)

    def allows(self, **found: int | str) -> bool:
        """Whether a choice meets the constraints so far."""
        return all(one.holds(found) for one in self.constraints)

    def scenario(self, strategy: Strategy, micro_batch: int) -> Scenario:
        """A strategy as a scenario."""
        return Scenario(
            spec=self.spec,
            layout=Layout.of(strategy),
            cluster=self.cluster,
            software=self.known.software[self.software],
            sequence_length=self.sequence_length,
            micro_batch=micro_batch,
            global_batch=self.global_batch,
            precision=self.precision,
            imbalance=routing_imbalance(self.spec, strategy.ep),
        )


def routing_imbalance(spec: ModelSpec, ep: int) -> float:
    """How much more rows the busiest expert-parallel rank gets than the mean: the expected maximum of normal loads."""
    if spec.experts is None or ep == 1:
        return 1.0
    per_rank = spec.experts.num_experts / ep
    return 1.0 + ROUTING_SPREAD / sqrt(per_rank) * sqrt(2 * ln(ep))


@dataclass(frozen=True)
class Candidate:
    """A strategy, and what is estimated of it."""

    strategy: Strategy
    micro_batch: int
    scenario: Scenario = field(repr=False, compare=False)
    memory: Memory = field(repr=False, compare=False)
    parts: Parts = field(repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total

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
        return flops / self.step_s / scenario.cluster.gpus / scenario.cluster.chip.peak(scenario.wide)

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
        return (self.step_s * (1 + FEATURE * self.features), *order)


def count_features(strategy: Strategy) -> int:
    """Features that a strategy uses."""
    used = [strategy.zero > 0, strategy.tp > 1, strategy.pp > 1, strategy.cp > 1, strategy.ep > 1]
    used += [strategy.schedule != "1f1b", strategy.layers != "even", strategy.recompute != "none"]
    used += [strategy.offload != "none", strategy.offload != "none", strategy.zero > 0 and strategy.replicate > 1]
    return sum(used)


@dataclass(frozen=True)
class Degrees:
    """What is fixed first, with a bound of what can come of it."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    micro_batch: int
    bound: float = 0.0


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


class Space:
    """All strategies that are searched for a question."""

    def __init__(self, question: Question) -> None:
        self.question = question

    def degrees(self) -> Iterator[Degrees]:
        """Degrees and micro-batches that fill the cluster and divide the batch."""
        question, spec = self.question, self.question.spec
        world = question.cluster.gpus
        heads, groups = spec.num_attention_heads, spec.num_key_value_heads
        for tp in divisors(world):
            # Tensor parallel stays within the fast links: its collectives stand in every layer's way.
            if tp > question.cluster.domain or heads % tp or (groups % tp and tp % groups) or not question.allows(tp=tp):
                continue
            if question.sequence_length % tp or spec.intermediate_size % tp or spec.vocab_size < tp:
                continue
            for pp in divisors(world // tp):
                if pp > spec.num_hidden_layers or not question.allows(pp=pp):
                    continue
                for cp in divisors(world // tp // pp):
                    if not self._context_fits(cp, tp) or not question.allows(cp=cp):
                        continue
                    dp = world // (tp * pp * cp)
                    if question.global_batch % dp or not question.allows(dp=dp):
                        continue
                    for ep in self._expert_degrees(dp):
                        for micro_batch in MICRO_BATCHES:
                            if question.global_batch % (dp * micro_batch) == 0 and question.allows(
                                ep=ep, micro_batch=micro_batch
                            ):
                                yield Degrees(tp, pp, cp, dp, ep, micro_batch)

    def _context_fits(self, cp: int, tp: int) -> bool:
        """Context parallel in powers of two, with at least 512 tokens in each half of a rank's part."""
        return cp == 1 or (cp & (cp - 1) == 0 and self.question.sequence_length % (2 * cp * tp) == 0
                           and self.question.sequence_length // cp >= 1024)  # fmt: skip

    def _expert_degrees(self, dp: int) -> list[int]:
        experts = self.question.spec.experts
        if experts is None:
            return [1]
        return [ep for ep in divisors(dp) if experts.num_experts % ep == 0]

    def rest(self, degrees: Degrees) -> Iterator[tuple[int, int, str, str, str]]:
        """(zero, shard, schedule, layers, cp_method) for degrees."""
        question, dp, pp = self.question, degrees.dp, degrees.pp
        for zero in (0, 1, 2, 3):
            if (zero and dp * degrees.cp == 1) or not question.allows(zero=zero):
                continue
            for shard in self._shards(degrees, zero):
                if not question.allows(shard=shard, replicate=dp // shard):
                    continue
                for schedule in self._schedules(pp, zero, dp * degrees.cp):
                    for layers in ("even", "balanced") if pp > 1 else ("even",):
                        for method in ("ring", "ulysses") if degrees.cp > 1 else ("ring",):
                            if question.allows(schedule=schedule, layers=layers, cp_method=method):
                                yield zero, shard, schedule, layers, method

    def _shards(self, degrees: Degrees, zero: int) -> list[int]:
        """State is shared by all data ranks, or by those within the fast links with copies across them."""
        dp = degrees.dp
        if not zero:
            return [1]
        inside = max(1, self.question.cluster.domain // (degrees.tp * degrees.cp))
        near = [shard for shard in (inside,) if 1 < shard < dp and dp % shard == 0]
        return [dp, *near]

    def _schedules(self, pp: int, zero: int, ranks: int) -> list[str]:
        """GPipe is never better than 1f1b: as long, and it holds more. Split backward passes need weights to stay."""
        if pp == 1:
            return ["1f1b"]
        per_rank = self.question.spec.num_hidden_layers // pp
        found = ["1f1b", *(f"interleaved:{count}" for count in (2, 3, 4, 5, 6, 8, 10, 12) if count <= per_rank)]
        if zero < 3 or ranks == 1:
            found.append("zero-bubble")
            found += ["zbv"] if per_rank >= 2 else []
        return found


def search(question: Question, objective: str = "throughput", keep: int = 40) -> Found:
    """The best strategy and its runners-up; the same question has the same answer always."""
    if objective not in OBJECTIVES:
        raise UserError(f"--objective={objective} is not one of {', '.join(OBJECTIVES)}")
    space = Space(question)
    pending = sorted(
        (replace(one, bound=bound_of(question, one)) for one in space.degrees()),
        key=lambda one: (one.bound, one.tp, one.pp, one.cp, one.ep, -one.micro_batch),
    )
    if not pending:
        raise UserError(_no_degrees(question))
    found: list[Candidate] = []
    nearest: Candidate | None = None
    best = float("inf")
    estimated = bounded = 0
    for index, degrees in enumerate(pending):
        if objective != "memory" and degrees.bound >= best:
            bounded = len(pending) - index
            break
        for candidate in _choices(question, space, degrees, best if objective != "memory" else float("inf")):
            estimated += 1
            if candidate.fits:
                found.append(candidate)
                best = min(best, candidate.score(objective)[0])
            elif nearest is None or candidate.memory.peak < nearest.memory.peak:
                nearest = candidate
    found.sort(key=lambda one: one.score(objective))
    return Found(found[0] if found else None, found[:keep], nearest, estimated, bounded)


def _no_degrees(question: Question) -> str:
    given = ", ".join(map(str, question.constraints))
    gpus, batch = question.cluster.gpus, question.global_batch
    if given:
        return (
            f"no strategy for {gpus} GPUs and a global batch of {batch} meets {given}; "
            "drop one of them, or change the batch so that data parallel ranks divide it"
        )
    return (
        f"a global batch of {batch} cannot be dealt out to {gpus} GPUs: what tensor, pipeline and context parallel leave "
        f"must divide it; use a multiple of {gpus}, or of a large divisor of it"
    )


def bound_of(question: Question, degrees: Degrees) -> float:
    """A score that no strategy with these degrees can be below.

    The slowest pipeline rank computes at least its share of all layers, for every micro-batch, with what tensor, context
    and expert parallel add; the optimizer's step cannot be shared more than over all ranks. Sums over data ranks, gaps
    in the pipeline, recompute and offload only add to that.
    """
    timer = Timer(question.scenario(_plain(degrees), degrees.micro_batch), question.known)
    spec, software = question.spec, timer.software
    work = sum(timer.head())
    kinds = [spec.is_sparse(layer) for layer in range(spec.num_hidden_layers)] if spec.experts else []
    for sparse in (False, True):
        count = kinds.count(sparse) if kinds else (0 if sparse else spec.num_hidden_layers)
        if count:
            one = timer.layer(sparse, False)
            # An exchange may be cheaper than a ring: context parallel counts nothing here.
            work += count * (one.forward + one.backward + one.weights + one.tp + one.ep)
    micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
    nodes = max(1.0, question.cluster.gpus / max(1, question.cluster.node))
    steady = micro_steps * work / degrees.pp
    floor = steady * (1 + (software.jitter * log2(nodes) if nodes > 1 else 0.0)) + software.step_s
    axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    return floor * (1 + FEATURE * axes)


def _plain(degrees: Degrees) -> Strategy:
    return Strategy(
        pp=degrees.pp, replicate=degrees.dp, cp=degrees.cp, tp=degrees.tp, ep=degrees.ep, sp=degrees.tp > 1
    )


def _choices(question: Question, space: Space, degrees: Degrees, best: float) -> Iterator[Candidate]:
    """Candidates with these degrees that may be better than the best; where a choice does not fit, what would."""
    offloads = [one for one in ("none", "optimizer", "parameters") if question.allows(offload=one)]
    seen_fit = False
    for offload in offloads:
        if offload != "none" and seen_fit:
            # What fits without offload is faster than the same with it.
            return
        for zero, shard, schedule, layers, method in space.rest(degrees):
            if offload == "parameters" and (zero < 2 or degrees.dp * degrees.cp == 1):
                continue
            strategy = Strategy(
                pp=degrees.pp,
                replicate=degrees.dp // shard if zero else degrees.dp,
                shard=shard,
                cp=degrees.cp,
                tp=degrees.tp,
                ep=degrees.ep,
                zero=zero,
                sp=degrees.tp > 1,
                schedule=schedule,
                layers=layers,
                cp_method=method,
                offload=offload,
            ) if degrees.ep == 1 or shard % degrees.ep == 0 or degrees.ep % shard == 0 else None  # fmt: skip
            if strategy is None:
                continue
            for choice in _with_recompute(question, strategy, degrees.micro_batch):
                memory, chosen = choice
                scenario = question.scenario(chosen, degrees.micro_batch)
                if memory.verdict == "fits":
                    seen_fit = True
                    timer = Timer(scenario, question.known)
                    rough = timer.parts(simulate=False)
                    if rough.total * (1 + FEATURE * count_features(chosen)) >= best:
                        continue
                    parts = timer.parts() if chosen.pp > 1 else rough
                    candidate = Candidate(chosen, degrees.micro_batch, scenario, memory, parts)
                    best = min(best, candidate.score("throughput")[0])
                    yield candidate
                else:
                    yield Candidate(chosen, degrees.micro_batch, scenario, memory, Parts(other=float("inf")))


def _with_recompute(question: Question, strategy: Strategy, micro_batch: int) -> Iterator[tuple[Memory, Strategy]]:
    """What fits of none, selective, first:N with the least N, and full; or the one that needs the least memory."""

    def memory(recompute: str) -> Memory:
        return memory_of(question.scenario(replace(strategy, recompute=recompute), micro_batch))

    if question.allows(recompute="none"):
        found = memory("none")
        if found.verdict == "fits":
            yield found, strategy
            return
    if question.allows(recompute="selective"):
        found = memory("selective")
        if found.verdict == "fits":
            yield found, replace(strategy, recompute="selective")
    layers = question.spec.num_hidden_layers
    full = memory("full")
    if full.verdict != "fits":
        if question.allows(recompute="full"):
            yield full, replace(strategy, recompute="full")
        return
    if question.allows(recompute="first:1"):
        low, high = 0, layers
        while high - low > 1:
            middle = (low + high) // 2
            if memory(f"first:{middle}").verdict == "fits":
                high = middle
            else:
                low = middle
        if high < layers:
            yield memory(f"first:{high}"), replace(strategy, recompute=f"first:{high}")
            return
    if question.allows(recompute="full"):
        yield full, replace(strategy, recompute="full")


def best_of_families(question: Question, objective: str = "throughput") -> dict[str, Found]:
    """The best of each family of strategies, for comparison."""
    families: dict[str, Sequence[Constraint]] = {
        "copies of the model": [Constraint("zero", "=", 0), *_single("tp", "pp", "cp")],
        "sharded (ZeRO, FSDP)": [Constraint("zero", ">=", 1), *_single("tp", "pp", "cp")],
        "tensor parallel": [Constraint("tp", ">", 1), *_single("pp")],
        "pipeline": [Constraint("pp", ">", 1), *_single("tp")],
        "tensor + pipeline": [Constraint("tp", ">", 1), Constraint("pp", ">", 1)],
    }
    found = {}
    for name, extra in families.items():
        try:
            found[name] = search(replace(question, constraints=(*question.constraints, *extra)), objective, keep=3)
        except UserError:
            continue
    return found


def _single(*axes: str) -> list[Constraint]:
    return [Constraint(axis, "=", 1) for axis in axes]
