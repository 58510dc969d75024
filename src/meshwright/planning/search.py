"""Search: the strategy that is best for a model on a cluster, among all that the trainer can run. No torch.

Degrees and the micro-batch are taken in the order of a bound below which no choice of the rest can bring the step; when
the bound of the next is not below the best so far, nothing better is left, and the search ends. The rest is searched in
full: ZeRO stage, copies, schedule, layer split, recompute; host memory only where nothing fits without it. Of
recompute=first:N only the least N that fits can be best, since each further layer costs time and saves memory. What a
search covers is in `Space`.

Distribution is a cost: a feature must earn one percent, or the choice without it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log as ln
from math import log2, sqrt

from meshwright.cluster.cluster import Cluster
from meshwright.errors import UserError
from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.constraints import Constraint
from meshwright.planning.memory import FITS, Memory, memory_of
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants, constants
from meshwright.planning.timing import OFFLOAD_S, Parts, Timer
from meshwright.schedules import stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy
from meshwright.strategy_fit import divisors

FEATURE = 0.01
"""What a feature must earn, as a share of the step."""
MOST_ZBV = 8
"""Pipeline ranks up to which zbv is searched: its order is made by playing it through, which takes long for more."""
MOST_UNEVEN = 32
"""Stages up to which uneven splits are searched."""
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

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        return count_parameters(self.spec).total

    def allows(self, **found: int | str) -> bool:
        """Whether a choice meets the constraints so far."""
        return all(one.holds(found) for one in self.constraints)

    def scenario(self, strategy: Strategy | Layout, micro_batch: int) -> Scenario:
        """A strategy as a scenario."""
        return Scenario(
            spec=self.spec,
            layout=strategy if isinstance(strategy, Layout) else Layout.of(strategy),
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


def count_features(strategy: Strategy | Layout) -> int:
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
        self._holds: dict[tuple[Degrees, str, int], bool] = {}

    def degrees(self) -> Iterator[Degrees]:
        """Degrees and micro-batches that fill the cluster and divide the batch."""
        question, spec = self.question, self.question.spec
        world = question.cluster.gpus
        heads, groups = spec.num_attention_heads, spec.num_key_value_heads
        for tp in divisors(world):
            # Tensor parallel stays within the fast links: its collectives stand in every layer's way.
            if (
                tp > question.cluster.domain
                or heads % tp
                or (groups % tp and tp % groups)
                or not question.allows(tp=tp)
            ):
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
                        # Who splits sequences has no room for several of them at once.
                        for micro_batch in MICRO_BATCHES if cp == 1 else (1,):
                            if question.global_batch % (dp * micro_batch) == 0 and question.allows(
                                ep=ep, micro_batch=micro_batch
                            ):
                                yield Degrees(tp, pp, cp, dp, ep, micro_batch)

    def _context_fits(self, cp: int, tp: int) -> bool:
        """Context parallel in powers of two, with at least 2048 tokens for each rank."""
        return cp == 1 or (cp & (cp - 1) == 0 and self.question.sequence_length % (2 * cp * tp) == 0
                           and self.question.sequence_length // cp >= 2048)  # fmt: skip

    def _expert_degrees(self, dp: int) -> list[int]:
        experts = self.question.spec.experts
        if experts is None:
            return [1]
        return [ep for ep in divisors(dp) if experts.num_experts % ep == 0]

    def states(self, degrees: Degrees) -> Iterator[tuple[int, int, str]]:
        """(zero, shard, cp_method) for degrees."""
        question, dp = self.question, degrees.dp
        for zero in self.zero_stages(degrees, "none"):
            for shard in self._shards(degrees, zero):
                if question.allows(shard=shard, replicate=dp // shard):
                    for method in ("ring", "ulysses") if degrees.cp > 1 else ("ring",):
                        if question.allows(cp_method=method):
                            yield zero, shard, method

    def orders(self, degrees: Degrees, zero: int) -> Iterator[tuple[str, str]]:
        """(schedule, layers) for degrees."""
        for schedule in self._schedules(degrees.pp, zero, degrees.dp * degrees.cp):
            for layers in self.splits(degrees.pp, schedule):
                if self.question.allows(schedule=schedule, layers=layers):
                    yield schedule, layers

    def zero_stages(self, degrees: Degrees, offload: str) -> list[int]:
        """Stages that make sense with some degrees, the least sharded first."""
        many = degrees.dp * degrees.cp > 1
        least = 2 if offload == "parameters" else 0
        return [zero for zero in range(4) if zero >= least and (zero == 0 or many) and self.question.allows(zero=zero)]

    def may_hold(self, degrees: Degrees, offload: str, zero: int) -> bool:
        """Whether a ZeRO stage can fit: with all recompute, the schedule that holds least, state spread furthest."""
        key = degrees, offload, zero
        if key not in self._holds:
            self._holds[key] = any(
                memory_of(self.question.scenario(layout, degrees.micro_batch), quick=True).verdict == "fits"
                for layout in self.smallest(degrees, offload, zero)
            )
        return self._holds[key]

    def smallest(self, degrees: Degrees, offload: str, zero: int) -> Iterator[Layout]:
        """What holds the least with that stage: both layer splits."""
        for layers in self.splits(degrees.pp, "1f1b"):
            yield replace(
                _plain(degrees),
                zero=zero,
                shard=degrees.dp if zero else 1,
                offload=offload,
                layers=layers,
                recompute=most_recompute(self.question),
            )

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
        found = ["1f1b", *(f"interleaved:{count}" for count in (2, 4, 8) if count <= per_rank)]
        if zero < 3 or ranks == 1:
            found.append("zero-bubble")
            found += ["zbv"] if per_rank >= 2 and pp <= MOST_ZBV else []
        return found

    def splits(self, pp: int, schedule: str) -> list[str]:
        """Evenly, and with fewer layers where the head is, if that is another split."""
        stages = pp * stages_per_rank(schedule)
        if pp == 1 or stages > MOST_UNEVEN or stages < 2:
            return ["even"]
        sizes = balanced_sizes(self.question.spec, stages)
        even = [len(part) for part in stage_layers(self.question.spec, stages, "even")]
        return ["even"] if sizes == even else ["even", "+".join(map(str, sizes))]


def balanced_sizes(spec: ModelSpec, stages: int) -> list[int]:
    """Layers of each stage where the head counts as the layers that cost as much."""
    layer = blocks.layer_work(spec, spec.is_sparse(spec.num_hidden_layers - 1), 1, 1, 1, False, 1, 1, 1.0)
    cost = sum(one.inner * one.outer * one.times * one.rows for one in layer.products)
    head = spec.vocab_size * spec.hidden_size / cost
    layers = spec.num_hidden_layers
    last = min(layers - stages + 1, max(1, round((layers + head) / stages - head)))
    each, more = divmod(layers - last, stages - 1)
    return [each + (stage < more) for stage in range(stages - 1)] + [last]


def search(question: Question, objective: str = "throughput", keep: int = 40) -> Found:
    """The best strategy and its runners-up; the same question has the same answer always."""
    if objective not in OBJECTIVES:
        raise UserError(f"--objective={objective} is not one of {', '.join(OBJECTIVES)}")
    space = Space(question)
    pending = _pending(question, space)
    if not pending:
        raise UserError(_no_degrees(question))
    if objective == "memory":
        return _least_memory(question, space, pending, keep)
    found: list[Candidate] = []
    estimated = bounded = 0
    # A little more than what is known to be possible, so that it is found again.
    start = _possible(question, space, pending)
    best = start.score(objective)[0] * (1 + 1e-9) if start is not None else float("inf")
    for offload in ("none", "optimizer", "parameters"):
        # Host memory is the last resort: it is looked at where nothing fits without it, or where it is asked for.
        if not question.allows(offload=offload) or found:
            continue
        for index, degrees in enumerate(pending):
            if degrees.bound >= best:
                bounded += len(pending) - index
                break
            if offload != "none" and _with_offload(question, degrees) >= best:
                bounded += 1
                continue
            if not any(space.may_hold(degrees, offload, zero) for zero in space.zero_stages(degrees, offload)):
                continue
            if bound_with_memory(question, degrees, _Least(question, space, degrees, offload)) >= best:
                bounded += 1
                continue
            for candidate in _choices(question, space, degrees, offload, best):
                estimated += 1
                found.append(candidate)
                best = min(best, candidate.score(objective)[0])
    found.sort(key=lambda one: one.score(objective))
    nearest = None if found else _nearest(question, space, pending)
    return Found(found[0] if found else None, found[:keep], nearest, estimated, bounded)


def _least_memory(question: Question, space: Space, pending: Sequence[Degrees], keep: int) -> Found:
    """What needs the least memory, without host memory unless it is asked for: all recompute, the leanest schedule."""
    offload = next((one for one in ("none", "optimizer", "parameters") if question.allows(offload=one)), "none")
    sized = [
        (memory_of(question.scenario(layout, degrees.micro_batch), quick=True).peak, index, layout, degrees)
        for index, (degrees, layout) in enumerate(
            (degrees, layout)
            for degrees in pending
            for zero in space.zero_stages(degrees, offload)
            for layout in space.smallest(degrees, offload, zero)
            if _allowed(question, layout)
        )
    ]
    found = []
    for _, _, layout, degrees in sorted(sized, key=lambda one: one[:2])[:keep]:
        found.append(estimate(question, layout.strategy(), degrees.micro_batch))
    fitting = sorted((one for one in found if one.fits), key=lambda one: one.score("memory"))
    nearest = None if fitting or not found else found[0]
    return Found(fitting[0] if fitting else None, fitting, nearest, len(sized), 0)


def plain_best(question: Question, most: int = 1 << 30) -> Candidate | None:
    """The best of the plain strategies (1f1b, even stages, recompute in whole steps): a quick answer, seldom far off.

    It looks at `most` degrees at most.
    """
    space = Space(question)
    return _possible(question, space, _pending(question, space)[:most])


def _pending(question: Question, space: Space) -> list[Degrees]:
    """Degrees in the order of their bounds."""
    return sorted(
        (replace(one, bound=bound_of(question, one)) for one in space.degrees()),
        key=lambda one: (one.bound, one.tp, one.pp, one.cp, one.ep, -one.micro_batch),
    )


def _possible(question: Question, space: Space, pending: Sequence[Degrees]) -> Candidate | None:
    """A good strategy, found among the plain ones: a good start cuts most of the search."""
    best: Candidate | None = None
    score = float("inf")
    for degrees in pending:
        if degrees.bound >= score:
            break
        timer: Timer | None = None
        for zero in space.zero_stages(degrees, "none"):
            if not space.may_hold(degrees, "none", zero):
                continue
            for recompute in ("none", "selective", "full"):
                layout = replace(_plain(degrees), zero=zero, shard=degrees.dp if zero else 1, recompute=recompute)
                weight = 1 + FEATURE * count_features(layout)
                if degrees.bound * weight / (1 + FEATURE * 4) >= score or not _allowed(question, layout):
                    continue
                scenario = question.scenario(layout, degrees.micro_batch)
                memory = memory_of(scenario, quick=True)
                if memory.verdict != "fits":
                    continue
                timer = timer or Timer(question.scenario(_plain(degrees), degrees.micro_batch), question.known)
                own = timer.like(scenario)
                if own.parts(simulate=False).total * weight < score:
                    parts = own.parts()
                    if parts.total * weight < score:
                        score = parts.total * weight
                        best = Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, parts)
                break
    return best


def _allowed(question: Question, layout: Layout) -> bool:
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "replicate", "schedule", "layers", "recompute", "offload")
    return question.allows(**{name: getattr(layout, name) for name in names}, cp_method=layout.cp_method)


def _no_degrees(question: Question) -> str:
    given = ", ".join(map(str, question.constraints))
    gpus, batch = question.cluster.gpus, question.global_batch
    if given:
        return (
            f"no strategy for {gpus} GPUs and a global batch of {batch} meets {given}; "
            "drop one of them, or change the batch so that data parallel ranks divide it"
        )
    return (
        f"a global batch of {batch} cannot be dealt out to {gpus} GPUs: what tensor, pipeline and context parallel "
        f"leave must divide it; use a multiple of {gpus}, or of a large divisor of it"
    )


def bound_of(question: Question, degrees: Degrees, again: float = 0.0, features: int = 0) -> float:
    """A score that no strategy with these degrees can be below; with so many seconds of recompute in all layers.

    The slowest pipeline rank computes at least its share of all layers, for every micro-batch, with what tensor and
    expert parallel add. Context parallel, sums over data ranks, gaps in the pipeline, the optimizer and offload only
    add to that.
    """
    timer = Timer(question.scenario(_plain(degrees), degrees.micro_batch), question.known)
    software = timer.software
    work = sum(timer.head()) + again
    for sparse, count in _layer_kinds(question.spec):
        one = timer.layer(sparse, False)
        work += count * (one.forward + one.backward + one.weights + one.tp + one.ep)
    micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
    nodes = max(1.0, question.cluster.gpus / max(1, question.cluster.node))
    steady = micro_steps * work / degrees.pp
    floor = steady * (1 + (software.jitter * log2(nodes) if nodes > 1 else 0.0)) + software.step_s
    axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep)) + (again > 0)
    axes += features
    return floor * (1 + FEATURE * axes)


def bound_with_memory(question: Question, degrees: Degrees, least: _Least) -> float:
    """The same, with the recompute that even the strategy of least memory needs to fit."""
    features = least.features()
    if question.allows(recompute="none") and least.may_fit("none"):
        return bound_of(question, degrees, features=features)
    layout = replace(_plain(degrees), recompute="selective")
    timer = Timer(question.scenario(layout, degrees.micro_batch), question.known)
    cheap = sum(count * timer.layer(sparse, False).again for sparse, count in _layer_kinds(question.spec))
    forward = min(timer.layer(sparse, True).forward for sparse, _ in _layer_kinds(question.spec))
    # Roughly how many layers: an eighth of them is close enough for a bound.
    low, high = 0, question.spec.num_hidden_layers
    while high - low > max(1, question.spec.num_hidden_layers // 8):
        middle = (low + high) // 2
        if least.may_fit(f"first:{middle}"):
            high = middle
        else:
            low = middle
    again = (low + 1) * forward
    return bound_of(question, degrees, min(again, cheap) if least.may_fit("selective") else again, features)


def _with_offload(question: Question, degrees: Degrees) -> float:
    """The bound with two more features, and the least that an offloaded optimizer takes: shared among all ranks."""
    axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    seconds = question.parameters / question.cluster.gpus * OFFLOAD_S
    return (degrees.bound / (1 + FEATURE * axes) + seconds) * (1 + FEATURE * (axes + 2))


def _layer_kinds(spec: ModelSpec) -> list[tuple[bool, int]]:
    """(is a mixture, how many layers), of those that there are."""
    if spec.experts is None:
        return [(False, spec.num_hidden_layers)]
    sparse = sum(map(spec.is_sparse, range(spec.num_hidden_layers)))
    kinds = [(True, sparse), (False, spec.num_hidden_layers - sparse)]
    return [kind for kind in kinds if kind[1]]


def _plain(degrees: Degrees) -> Layout:
    return Layout(
        dp=degrees.dp,
        tp=degrees.tp,
        pp=degrees.pp,
        cp=degrees.cp,
        ep=degrees.ep,
        expert_tp=degrees.tp,
        sp=degrees.tp > 1,
    )


@dataclass(frozen=True)
class _Choice:
    """Everything but recompute."""

    layout: Layout
    rough: float
    """A score below which recompute cannot bring it."""


def _choices(question: Question, space: Space, degrees: Degrees, offload: str, best: float) -> Iterator[Candidate]:
    """Candidates with these degrees that fit and may be better than the best."""
    timer = Timer(question.scenario(_plain(degrees), degrees.micro_batch), question.known)
    for choice in sorted(_rest_of(question, space, degrees, offload, timer, best), key=lambda one: one.rough):
        if choice.rough >= best:
            return
        for memory, chosen in _with_recompute(question, choice, degrees, timer, best):
            scenario = question.scenario(chosen, degrees.micro_batch)
            own = timer.like(scenario)
            parts = own.parts(simulate=False)
            weight = 1 + FEATURE * count_features(chosen)
            if parts.total * weight >= best:
                continue
            if chosen.pp > 1:
                parts = own.parts()
            candidate = Candidate(chosen.strategy(), degrees.micro_batch, scenario, memory, parts)
            best = min(best, candidate.step_s * weight)
            yield candidate


def _rest_of(
    question: Question, space: Space, degrees: Degrees, offload: str, timer: Timer, best: float
) -> Iterator[_Choice]:
    """Choices that may fit and may be better than the best, without recompute."""
    stages = [zero for zero in space.zero_stages(degrees, offload) if space.may_hold(degrees, offload, zero)]
    for zero, shard, method in space.states(degrees):
        if zero not in stages or (degrees.ep > 1 and shard % degrees.ep and degrees.ep % shard):
            continue
        base = replace(_plain(degrees), zero=zero, shard=shard, cp_method=method, offload=offload)
        weight = 1 + FEATURE * count_features(base)
        if degrees.pp > 1:
            floor = timer.like(question.scenario(base, degrees.micro_batch)).without_gaps()
            if floor * weight >= best:
                continue
        for schedule, layers in space.orders(degrees, zero):
            layout = replace(base, schedule=schedule, layers=layers)
            scenario = question.scenario(layout, degrees.micro_batch)
            rough = timer.like(scenario).parts(simulate=False).total * (1 + FEATURE * count_features(layout))
            if rough < best:
                yield _Choice(layout, rough)


class _Least:
    """Whether anything with some degrees can fit: a floor of the memory of all that can be chosen with them.

    Of the schedules 1f1b holds the fewest micro-batches, and of the states a rank has at least the shards that it
    updates, spread over all data ranks; both layer splits are looked at.
    """

    def __init__(self, question: Question, space: Space, degrees: Degrees, offload: str) -> None:
        self.question, self.space, self.degrees = question, space, degrees
        stages = space.zero_stages(degrees, offload)
        self.layouts = [
            replace(_plain(degrees), zero=zero, shard=degrees.dp if zero else 1, offload=offload, layers=layers)
            for zero in stages[-1:]
            for layers in space.splits(degrees.pp, "1f1b")
        ]

    def may_fit(self, recompute: str) -> bool:
        """Whether nothing rules it out."""
        question, micro_batch = self.question, self.degrees.micro_batch
        return any(
            memory_of(question.scenario(replace(layout, recompute=recompute), micro_batch), True, True).verdict
            == "fits"
            for layout in self.layouts
        )

    def features(self) -> int:
        """Features that are needed whatever else: sharded state where copies do not fit, host memory."""
        offload = self.layouts[0].offload
        many = self.degrees.dp * self.degrees.cp > 1
        return 2 * (offload != "none") + (many and not self.space.may_hold(self.degrees, offload, 0))


def most_recompute(question: Question) -> str:
    """The recompute that saves the most memory of what is allowed."""
    if question.allows(recompute="full"):
        return "full"
    if question.allows(recompute="first:1"):
        return f"first:{question.spec.num_hidden_layers}"
    return "selective" if question.allows(recompute="selective") else "none"


def _nearest(question: Question, space: Space, pending: Sequence[Degrees]) -> Candidate | None:
    """Where nothing fits, what needs the least memory."""
    found: Candidate | None = None
    offload = next((one for one in ("parameters", "optimizer", "none") if question.allows(offload=one)), "none")
    for degrees in pending:
        for zero in space.zero_stages(degrees, offload) or space.zero_stages(degrees, "none"):
            layout = replace(
                _plain(degrees),
                zero=zero,
                shard=degrees.dp if zero else 1,
                offload=offload if space.zero_stages(degrees, offload) else "none",
                recompute=most_recompute(question),
            )
            scenario = question.scenario(layout, degrees.micro_batch)
            memory = memory_of(scenario, quick=True)
            if found is None or memory.peak < found.memory.peak:
                found = Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, Parts(other=float("inf")))
    return found


def _with_recompute(
    question: Question, choice: _Choice, degrees: Degrees, timer: Timer, best: float
) -> Iterator[tuple[Memory, Layout]]:
    """What fits of none, selective, first:N with the least N, and full, and may be better than the best."""
    layout = choice.layout

    def memory(recompute: str) -> Memory:
        return memory_of(question.scenario(replace(layout, recompute=recompute), degrees.micro_batch), quick=True)

    none = memory("none")
    if question.allows(recompute="none") and none.verdict == "fits":
        yield none, layout
        return
    # Recompute is one more feature to earn its place.
    used = count_features(layout)
    weight = (1 + FEATURE * (used + 1)) / (1 + FEATURE * used)
    if choice.rough * weight >= best:
        return
    if question.allows(recompute="selective"):
        found = memory("selective")
        if found.verdict == "fits":
            yield found, replace(layout, recompute="selective")
    full = memory("full")
    if full.verdict != "fits":
        return
    layers = question.spec.num_hidden_layers
    needed = _needed_layers(none, full, layers / degrees.pp)
    forward = min(timer.layer(sparse, True).forward for sparse, _ in _layer_kinds(question.spec))
    micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
    if choice.rough * weight + micro_steps * needed * forward >= best:
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
            yield memory(f"first:{high}"), replace(layout, recompute=f"first:{high}")
            return
    if question.allows(recompute="full"):
        yield full, replace(layout, recompute="full")


def _needed_layers(none: Memory, full: Memory, layers: float) -> float:
    """Layers that must be computed again at least without a pipeline: each saves the same, and needs room to work."""
    before, after = none.stages[0], full.stages[0]
    save = before.total - after.total + 2 * after.working
    excess = before.total - FITS * none.capacity
    return max(0.0, excess / save * layers) if save > 0 and len(none.stages) == 1 else 0.0


def families() -> dict[str, tuple[Constraint, ...]]:
    """Families of strategies that people compare, as constraints."""

    def single(*axes: str) -> list[Constraint]:
        return [Constraint(axis, "=", 1) for axis in axes]

    return {
        "copies of the model": (Constraint("zero", "=", 0), *single("tp", "pp", "cp")),
        "sharded state (ZeRO, FSDP)": (Constraint("zero", ">=", 1), *single("tp", "pp", "cp")),
        "tensor parallel": (Constraint("tp", ">", 1), *single("pp")),
        "pipeline": (Constraint("pp", ">", 1), *single("tp")),
        "tensor + pipeline": (Constraint("tp", ">", 1), Constraint("pp", ">", 1)),
    }


def family_of(strategy: Strategy) -> str:
    """The family that a strategy belongs to."""
    if strategy.tp > 1:
        return "tensor + pipeline" if strategy.pp > 1 else "tensor parallel"
    if strategy.pp > 1:
        return "pipeline"
    return "sharded state (ZeRO, FSDP)" if strategy.zero else "copies of the model"


def estimate(question: Question, strategy: Strategy, micro_batch: int) -> Candidate:
    """One strategy, whether it fits or not."""
    scenario = question.scenario(strategy, micro_batch)
    return Candidate(strategy, micro_batch, scenario, memory_of(scenario), Timer(scenario, question.known).parts())


def in_full(question: Question, candidate: Candidate) -> Candidate:
    """A candidate of a search with the memory of all its pipeline ranks, and a time if it had none."""
    return estimate(question, candidate.strategy, candidate.micro_batch)
