"""The space of a search: all strategies that the trainer can run and that can be best. No torch.

Degrees and the micro-batch come first; the rest hangs on them: ZeRO stage, copies, schedule, layer split, recompute,
host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshwright.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.memory import FITS, does_fit
from meshwright.planning.operations import Operations
from meshwright.planning.path_waits import PathWaits
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.planning.timing import Timer
from meshwright.schedules import stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import OFFLOAD, host_states
from meshwright.strategy_fit import divisors

MOST_ZBV = 8
"""Pipeline ranks up to which zbv is searched: its order is made by playing it through, which takes long for more."""
MOST_UNEVEN = 32
"""Stages up to which uneven splits are searched."""
MICRO_BATCH = 32
"""Samples of a pass up to which all powers of two are searched; more of them where sequences are short."""
LEAST_CONTEXT = 2048
"""Tokens of a rank that shares sequences with others."""
PASS_TOKENS = 1 << 15
"""Tokens of a pass up to which that goes on."""


@dataclass(frozen=True)
class Degrees:
    """What is fixed first, with a bound of what can come of it."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    micro_batch: int
    sp: bool = False
    bound: float = field(default=0.0, compare=False)


class Space:
    """All strategies that are searched for a question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.waits = PathWaits(question.cluster, question.known)
        self._holds: dict[tuple[Degrees, str, int], bool] = {}
        self._timers: dict[Degrees, Timer] = {}
        self._operations: Operations | None = None
        self._legal: dict[Layout, bool] = {}
        self._splits: dict[int, list[str]] = {}
        self._floors: dict[tuple[Degrees, str, str, str], float] = {}

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
            sequence = self._sequence_parallel(tp)
            if sequence is None or spec.intermediate_size % tp or spec.vocab_size < tp:
                continue
            for pp in divisors(world // tp):
                if pp > spec.num_hidden_layers or not question.allows(pp=pp):
                    continue
                for cp in divisors(world // tp // pp):
                    if not self._context_fits(cp, tp) or not question.allows(cp=cp):
                        continue
                    dp = world // (tp * pp * cp)
                    if question.shared % dp or not question.allows(dp=dp):
                        continue
                    for ep in self._expert_degrees(dp):
                        if not self.legal(Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_tp=tp, sp=sequence)):
                            continue
                        for micro_batch in micro_batches(question, question.shared // dp, cp):
                            if question.allows(ep=ep, micro_batch=micro_batch):
                                yield Degrees(tp, pp, cp, dp, ep, micro_batch, sequence)

    def legal(self, layout: Layout) -> bool:
        """Whether the trainer would take it."""
        if layout not in self._legal:
            question = self.question
            try:
                layout.strategy().check(question.spec, question.cluster.gpus, question.sequence_length)
                self._legal[layout] = True
            except ConfigError:
                self._legal[layout] = False
        return self._legal[layout]

    def timer(self, degrees: Degrees) -> Timer:
        """A timer of the plain layout of degrees, to be had again by all that looks at them."""
        if degrees not in self._timers:
            scenario = self.question.scenario(plain(degrees), degrees.micro_batch)
            self._timers[degrees] = Timer(scenario, self.question.known, self._operations)
            self._operations = self._timers[degrees].operations
        return self._timers[degrees]

    def _sequence_parallel(self, tp: int) -> bool | None:
        """Whether tensor-parallel ranks split tokens: where they can, since it sends as much and holds less.

        None where the constraints allow neither.
        """
        can = tp > 1 and self.question.sequence_length % tp == 0
        choices = [sp for sp in (True, False) if (can or not sp) and self.question.allows(sp="on" if sp else "off")]
        return choices[0] if choices else None

    def _context_fits(self, cp: int, tp: int) -> bool:
        """Context parallel in powers of two, with enough tokens for each rank."""
        return cp == 1 or (cp & (cp - 1) == 0 and self.question.sequence_length % (2 * cp * tp) == 0
                           and self.question.sequence_length // cp >= LEAST_CONTEXT)  # fmt: skip

    def _expert_degrees(self, dp: int) -> list[int]:
        experts = self.question.spec.experts
        if experts is None:
            return [1]
        return [ep for ep in divisors(dp) if experts.num_experts % ep == 0]

    def offloads(self) -> list[str]:
        """What can live in host memory; where ranks compute on cores, that is the memory they have anyway."""
        question = self.question
        if question.cluster.chip.key == "cpu" and question.allows(offload="none"):
            return ["none"]
        return [one for one in OFFLOAD if question.allows(offload=one)]

    def states(self, degrees: Degrees) -> Iterator[tuple[int, int, str]]:
        """(zero, shard, cp_method) for degrees."""
        question, dp = self.question, degrees.dp
        for zero in self.zero_stages(degrees, "none"):
            for shard in self._shards(degrees, zero):
                if question.allows(shard=shard, replicate=dp // shard):
                    for method in ("ring", "ulysses") if degrees.cp > 1 else ("ring",):
                        layout = replace(plain(degrees), cp_method=method)
                        if question.allows(cp_method=method) and (method == "ring" or self.legal(layout)):
                            yield zero, shard, method

    def orders(self, degrees: Degrees, zero: int) -> Iterator[tuple[str, str]]:
        """(schedule, layers) for degrees."""
        for schedule in self.schedules(degrees, zero):
            for layers in self.splits(degrees.pp, schedule):
                if self.question.allows(schedule=schedule, layers=layers):
                    yield schedule, layers

    def order_floor(self, degrees: Degrees, method: str, schedule: str, layers: str) -> float:
        """A bound of the step with an order, whatever is done with state."""
        key = degrees, method, schedule, layers
        if key not in self._floors:
            layout = replace(plain(degrees), cp_method=method, schedule=schedule, layers=layers)
            scenario = self.question.scenario(layout, degrees.micro_batch)
            self._floors[key] = self.timer(degrees).like(scenario).passes_floor()
        return self._floors[key]

    def schedules(self, degrees: Degrees, zero: int) -> list[str]:
        """Schedules for degrees."""
        found = self._schedules(degrees.pp, zero, degrees.dp * degrees.cp)
        return [schedule for schedule in found if self.question.allows(schedule=schedule)]

    def zero_stages(self, degrees: Degrees, offload: str) -> list[int]:
        """Stages that make sense with some degrees, the least sharded first."""
        many = degrees.dp * degrees.cp > 1
        least = 2 if host_states(offload) == "parameters" else 0
        return [zero for zero in range(4) if zero >= least and (zero == 0 or many) and self.question.allows(zero=zero)]

    def may_hold(self, degrees: Degrees, offload: str, zero: int) -> bool:
        """Whether a ZeRO stage can fit: with all recompute, the schedule that holds least, state spread furthest."""
        key = degrees, offload, zero
        if key not in self._holds:
            # What fits without host memory fits with it, as far as the chip's own goes.
            known = offload != "none" and self._holds.get((degrees, "none", zero), False)
            self._holds[key] = known or (
                self._states_may_fit(degrees, offload, zero)
                and any(
                    does_fit(self.question.scenario(layout, degrees.micro_batch))
                    for layout in self.smallest(degrees, offload, zero)
                )
            )
        return self._holds[key]

    def _states_may_fit(self, degrees: Degrees, offload: str, zero: int) -> bool:
        """Whether a rank with its even share of the model has room for that alone."""
        question = self.question
        if question.spec.experts is not None:
            return True
        software = question.trainer
        elements = question.parameters / (degrees.tp * degrees.pp)
        shards = degrees.dp * degrees.cp if zero else 1
        states = host_states(offload)
        stored = software.parameter_bytes if states != "parameters" else 0
        held = (stored + software.gradient_bytes) / (shards if zero > 1 else 1)
        held += software.optimizer_bytes / shards if states == "none" else 0.0
        return elements * held <= FITS * question.cluster.memory

    def smallest(self, degrees: Degrees, offload: str, zero: int) -> Iterator[Layout]:
        """What holds the least with that stage: both layer splits."""
        for layers in self.splits(degrees.pp, "1f1b"):
            yield replace(
                plain(degrees),
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
        if stages not in self._splits:
            self._splits[stages] = ["even"]
            if pp > 1 and 2 <= stages <= MOST_UNEVEN:
                sizes = balanced_sizes(self.question.spec, stages)
                even = [len(part) for part in stage_layers(self.question.spec, stages, "even")]
                self._splits[stages] += [] if sizes == even else ["+".join(map(str, sizes))]
        return self._splits[stages]


def micro_batches(question: Question, share: int, cp: int) -> list[int]:
    """Powers of two that divide a rank's share, and the whole of it, unless that is long."""
    if cp > 1:
        return [1]  # Who splits sequences has no room for several of them at once.
    most = max(MICRO_BATCH, PASS_TOKENS // question.sequence_length)
    found = {1 << power for power in range(most.bit_length()) if share % (1 << power) == 0 and 1 << power <= most}
    # One that is asked for need not be a power of two.
    asked = [one.value for one in question.constraints if one.key == "micro_batch" and one.sign == "="]
    found |= {size for size in asked if isinstance(size, int) and size > 0 and share % size == 0}
    return sorted(found | ({share} if share <= most else set()))


def balanced_sizes(spec: ModelSpec, stages: int) -> list[int]:
    """Layers of each stage where the head counts as the layers that cost as much."""
    layer = blocks.layer_work(spec, spec.is_sparse(spec.num_hidden_layers - 1), 1, 1, 1, False, 1, 1, 1.0)
    cost = sum(one.inner * one.outer * one.times * one.rows for one in layer.products)
    head = spec.vocab_size * spec.hidden_size / cost
    layers = spec.num_hidden_layers
    last = min(layers - stages + 1, max(1, round((layers + head) / stages - head)))
    each, more = divmod(layers - last, stages - 1)
    return [each + (stage < more) for stage in range(stages - 1)] + [last]


def plain(degrees: Degrees) -> Layout:
    """Copies of the model, with these degrees and nothing else."""
    return Layout(
        dp=degrees.dp,
        tp=degrees.tp,
        pp=degrees.pp,
        cp=degrees.cp,
        ep=degrees.ep,
        expert_tp=degrees.tp,
        sp=degrees.sp,
    )


def most_recompute(question: Question) -> str:
    """The recompute that saves the most memory of what is allowed."""
    if question.allows(recompute="full"):
        return "full"
    if question.allows(recompute="first:1"):
        return f"first:{question.spec.num_hidden_layers}"
    return "selective" if question.allows(recompute="selective") else "none"


def allowed(question: Question, layout: Layout) -> bool:
    """Whether a layout meets the constraints, and what else limits it."""
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "replicate", "schedule", "layers", "recompute", "offload")
    return question.takes(layout) and question.allows(
        **{name: getattr(layout, name) for name in names},
        cp_method=layout.cp_method,
        shares=layout.shares,
        sp="on" if layout.sp and layout.tp > 1 else "off",
    )
