"""What each pipeline rank of a scenario holds at its peak, term by term. Closed forms, no torch.

Torch's own count (allocated) is the sum of states, activations, logits and buffers; the allocator holds more
(reserved), and the driver has given out more than that (device): its context and the communicators' buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks, pipeline
from meshwright.planning.blocks import Work
from meshwright.planning.scenario import Scenario, Stages

GIB = float(1 << 30)
CPU_PROCESS_GIB, CPU_GROUP_GIB = 0.35, 0.01
"""Of a rank on a CPU: the interpreter with PyTorch, and a group's sockets."""
FITS = 0.90
"""Share of a chip's memory up to which a peak is called safe; from there to all of it is tight."""


@dataclass(frozen=True)
class Terms:
    """Bytes of one rank at the peak of the forward and backward passes."""

    parameters: float = 0.0
    gathered: float = 0.0
    """Parameters gathered or cast for computing."""
    gradients: float = 0.0
    optimizer: float = 0.0
    attention: float = 0.0
    """Activations kept by attention and the norms around it."""
    feed_forward: float = 0.0
    """Activations kept by feed-forwards and experts."""
    layer_inputs: float = 0.0
    """All that recomputed layers keep."""
    working: float = 0.0
    """What the layer at work needs beside."""
    logits: float = 0.0
    buffers: float = 0.0
    """Of collectives and transfers, in torch's hands."""
    fragmentation: float = 0.0
    communicators: float = 0.0
    context: float = 0.0
    correction: float = 0.0
    """What runs on these machines held beyond the estimate."""

    @property
    def allocated(self) -> float:
        """What torch counts as in use."""
        return (
            self.parameters + self.gathered + self.gradients + self.optimizer + self.attention + self.feed_forward
            + self.layer_inputs + self.working + self.logits + self.buffers
        )  # fmt: skip

    @property
    def reserved(self) -> float:
        """What torch's allocator holds."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """What the device has given out."""
        return self.allocated + self.fragmentation + self.communicators + self.context + self.correction

    @property
    def activations(self) -> float:
        """All activations that wait for their backward pass."""
        return self.attention + self.feed_forward + self.layer_inputs

    @property
    def states(self) -> float:
        """What is there whatever the batch."""
        return self.parameters + self.gathered + self.gradients + self.optimizer


@dataclass(frozen=True)
class Memory:
    """The peaks of all pipeline ranks."""

    stages: tuple[Terms, ...]
    host: float
    """Bytes of host memory for each rank."""
    capacity: float
    """Bytes of a chip; of the fullest rank's, where they differ."""
    host_capacity: float
    capacities: tuple[float, ...] = ()
    """Of each pipeline rank's chip, where they differ."""

    def room(self, rank: int) -> float:
        """Bytes of a pipeline rank's chip."""
        return self.capacities[rank] if self.capacities else self.capacity

    @property
    def fullest(self) -> int:
        """The pipeline rank with the highest peak, for its chip."""
        return max(range(len(self.stages)), key=lambda rank: self.stages[rank].total / self.room(rank))

    @property
    def peak(self) -> float:
        """Bytes of that rank."""
        return self.stages[self.fullest].total

    @property
    def share(self) -> float:
        """Of the chip's memory."""
        return self.peak / self.capacity

    @property
    def hard_share(self) -> float:
        """The same without fragmentation: more than all is certain to fail."""
        return max((terms.total - terms.fragmentation) / self.room(rank) for rank, terms in enumerate(self.stages))

    @property
    def verdict(self) -> str:
        """fits, tight or does not fit."""
        # What is fragmented can be given back when memory runs short, at the cost of time.
        if self.hard_share > 1 or self.host > self.host_capacity:
            return "does not fit"
        return "fits" if self.share <= FITS else "tight"


def kept_by_layer(scenario: Scenario, work: Work, again: bool) -> tuple[float, float, float]:
    """Bytes that one layer keeps of one micro-batch: attention and norms, feed-forward, input of a recomputed one."""
    element = scenario.element
    if again:
        return 0.0, 0.0, work.input * element
    if scenario.selective and scenario.flash_attention:
        inner = work.saved_inner * 2
        share = scenario.software.selective_saved
        return (work.saved_selective - inner) * share * element + work.saved_bytes, inner * share * element, 0.0
    scores = 0.0 if scenario.flash_attention or scenario.selective else 5.0 * work.scores
    # Dense feed-forwards that are not gated keep two inner tensors, which `saved` holds already.
    inner = work.saved_inner * scenario.software.mlp_saved
    if scenario.software.narrow_saved and scenario.dtype != scenario.wide:
        # Inputs of products are kept as they were cast: half as wide, or a quarter with their scales.
        less = work.cast * (0.5 if scenario.dtype == "fp8" else 0.7)
        return (work.saved - less) * element + work.saved_bytes + scores, inner * element, 0.0
    return work.saved * element + work.saved_bytes + scores, inner * element, 0.0


def memory_of(scenario: Scenario, quick: bool = False, floor: bool = False) -> Memory:
    """The peaks of every pipeline rank.

    `quick` leaves out ranks that cannot be the fullest. `floor` counts of the states only the shards that a rank
    updates, which no ZeRO stage is below, and nothing that only some of them have.
    """
    layout = scenario.layout
    micro_steps = max(1, round(scenario.micro_steps))
    if layout.pp > 1:
        flights = pipeline.in_flight(layout.schedule, layout.pp, micro_steps)
    else:
        flights = [(1,)]
    stages = scenario.stages
    chosen = _may_be_fullest(scenario, stages, flights) if quick and layout.pp > 2 else range(layout.pp)
    info = _LayerInfo(scenario)
    ranks = tuple(_rank(scenario, info, stages[rank], flights[rank], floor) for rank in chosen)
    cluster = scenario.cluster
    return Memory(ranks, _host(scenario), cluster.memory, cluster.host_gib * GIB)


def _may_be_fullest(
    scenario: Scenario, stages: tuple[tuple[range, ...], ...], flights: list[tuple[int, ...]]
) -> list[int]:
    """Of pipeline ranks that hold alike layers, the one with the most micro-batches in flight; both ends."""
    last = len(stages) - 1
    most: dict[tuple[object, ...], int] = {}
    for rank in range(1, last):
        key: tuple[object, ...] = tuple([(len(part), scenario.recomputed(part)) for part in stages[rank]])
        if scenario.spec.experts is not None:
            key = (*key, *[scenario.spec.is_sparse(layer) for part in stages[rank] for layer in part])
        other = most.get(key)
        if other is None or flights[rank] > flights[other]:
            most[key] = rank
    return [0, *most.values(), last]


class _LayerInfo(dict[tuple[bool, bool], tuple[float, float, float, float, blocks.Held]]):
    """For each kind of layer (a mixture or not, computed again or not): what it keeps, needs beside, and holds."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario

    def __missing__(self, key: tuple[bool, bool]) -> tuple[float, float, float, float, blocks.Held]:
        sparse, again = key
        scenario, layout = self.scenario, self.scenario.layout
        work = _work(scenario, sparse)
        kept = kept_by_layer(scenario, work, again)
        # The gradient of the widest product's output, beside what is kept.
        beside = work.widest * scenario.element
        if again:
            whole = kept_by_layer(scenario, work, False)
            beside += whole[0] + whole[1]
        held = blocks.layer_parameters(scenario.spec, sparse, layout.tp, layout.ep, layout.expert_tp)
        self[key] = (*kept, beside, held)
        return self[key]


def _rank(
    scenario: Scenario, info: _LayerInfo, parts: tuple[range, ...], flights: tuple[int, ...], floor: bool
) -> Terms:
    spec, layout, software = scenario.spec, scenario.layout, scenario.software
    element = scenario.element
    attention = feed_forward = inputs = working = layers_kept = 0.0
    plain = experts = largest = 0.0
    for part, flight in zip(parts, flights, strict=True):
        for sparse, recomputed, count in _kinds(scenario, part, scenario.recomputed(part)):
            kept_attention, kept_inner, kept_input, beside, held = info[sparse, recomputed]
            times = flight * count
            attention += times * kept_attention
            feed_forward += times * kept_inner
            inputs += times * kept_input
            plain, experts = plain + count * held.plain, experts + count * held.experts
            largest, working = max(largest, held.all), max(working, beside)
            if not recomputed and not scenario.selective:
                # What is computed again casts its weights again.
                layers_kept += count * held.all
    has_first = any(part.start == 0 for part in parts)
    has_last = any(part.stop == spec.num_hidden_layers for part in parts)
    first, last = blocks.ends_parameters(spec, layout.tp)
    ends = (first if has_first else 0.0) + (last if has_last and not (spec.tie_word_embeddings and has_first) else 0.0)
    # A lookup in a cast table keeps no table for its backward pass; the head's product does.
    kept = layers_kept + (last if has_last else 0.0)
    states = _states(scenario, plain + ends, experts, ends, largest, kept, floor)
    logits = 0.0
    if has_last:
        logits = scenario.tokens * spec.vocab_size / layout.tp * software.logit_bytes / scenario.loss_chunks
        inputs += 2 * scenario.tokens / (layout.tp if layout.sp else 1) * spec.hidden_size * element
    if layout.tp > 1:
        working += scenario.tokens * spec.hidden_size * element
    buffers = software.bucket_gib * GIB if layout.dp > 1 else 0.0
    if layout.pp > 1:
        stage_input = scenario.tokens / (layout.tp if layout.sp else 1) * spec.hidden_size * element
        buffers += sum(flights) * (software.stage_buffers - 1) * stage_input
        buffers += 4 * scenario.tokens / (layout.tp if layout.sp else 1) * spec.hidden_size * element
    if layout.cp > 1:
        buffers += 4 * _work(scenario, False).kv_elements * element
    if layout.zero >= 2 and layout.state_ranks > 1 and not floor:
        # What is under way: the next unit's parameters, the last one's gradients.
        buffers += largest * (software.gather_bytes + software.reduce_bytes)
    # Logits and the layer at work have their peaks at different times.
    logits, working = (logits, 0.0) if logits > working else (0.0, working)
    groups = sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep))
    is_gpu = scenario.cluster.chip.key != "cpu"
    in_use = sum(states) + attention + feed_forward + inputs + working + logits + buffers
    return Terms(
        parameters=states[0],
        gathered=states[1],
        gradients=states[2],
        optimizer=states[3],
        attention=attention,
        feed_forward=feed_forward,
        layer_inputs=inputs,
        working=working,
        logits=logits,
        buffers=buffers,
        fragmentation=software.fragmentation * (in_use - states[3]),
        communicators=groups * (software.group_gib if is_gpu else CPU_GROUP_GIB) * GIB,
        context=(software.context_gib if is_gpu else CPU_PROCESS_GIB) * GIB,
    )


def _states(
    scenario: Scenario, plain: float, experts: float, ends: float, largest: float, kept: float, floor: bool
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gathered ones, gradients and optimizer state."""
    layout, software = scenario.layout, scenario.software
    shards = layout.state_ranks if layout.zero else 1
    expert_shards = layout.expert_state_ranks
    whole, own = plain + experts, plain / shards + experts / expert_shards
    narrow = scenario.element
    wide = software.parameter_bytes if scenario.precision != "float32" else 4.0
    gradient = software.gradient_bytes if scenario.precision != "float32" else 4.0
    moments = software.optimizer_bytes if scenario.precision != "float32" else 8.0
    optimizer = own * moments if layout.offload == "none" else 0.0
    if floor:
        return own * wide if layout.offload != "parameters" else 0.0, 0.0, own * gradient, optimizer
    casts = kept * narrow if software.cast_copy and scenario.precision != "float32" else 0.0
    if layout.zero < 2 or layout.state_ranks == 1:
        return (
            whole * wide,
            casts,
            whole * gradient,
            (optimizer if layout.zero else whole * moments * (layout.offload == "none")),
        )
    stored = own * wide if layout.offload != "parameters" else 0.0
    if layout.zero == 2:
        gradients = (whole if layout.pp > 1 and software.cast_copy else own + largest) * gradient
        if software.parameter_bytes == 2:
            return whole * wide, 0.0, gradients, optimizer
        return stored, whole * narrow, gradients, optimizer
    gathered = min(whole, ends + 2 * largest) * narrow
    gradients = own * gradient + (largest + (ends if software.cast_copy else 0)) * software.reduce_bytes
    if layout.pp > 1 and software.cast_copy:
        # Our pipeline adds gradients up whole and scatters them at the end.
        gradients = whole * gradient
    return stored, gathered, gradients, optimizer


def _host(scenario: Scenario) -> float:
    """Host memory of a rank: the process, and what is offloaded."""
    layout = scenario.layout
    base = 4.0 * GIB if scenario.cluster.chip.key != "cpu" else 0.3 * GIB
    if layout.offload == "none":
        return base
    shards = layout.state_ranks if layout.zero else 1
    most = _fullest_shard(
        scenario.spec, scenario.stages, layout.tp, layout.ep, layout.expert_tp, shards, layout.expert_state_ranks
    )
    # Moments, the copy that is updated, and gradients on their way; with parameters those too.
    return base + most * (16 if layout.offload == "optimizer" else 20)


@blocks.remembered
def _fullest_shard(
    spec: ModelSpec, stages: Stages, tp: int, ep: int, expert_tp: int, shards: int, expert_shards: int
) -> float:
    """Elements that the fullest rank updates."""
    most = 0.0
    for parts in stages:
        total = 0.0
        for layer in (layer for part in parts for layer in part):
            held = blocks.layer_parameters(spec, spec.is_sparse(layer), tp, ep, expert_tp)
            total += held.plain / shards + held.experts / expert_shards
        most = max(most, total)
    return most + sum(blocks.ends_parameters(spec, tp)) / shards


def _work(scenario: Scenario, sparse: bool) -> Work:
    layout = scenario.layout
    return blocks.layer_work(
        scenario.spec, sparse, scenario.tokens, scenario.sequence_length,
        layout.tp, layout.sp, layout.ep, layout.expert_tp, scenario.imbalance,
    )  # fmt: skip


def _kinds(scenario: Scenario, part: range, again: int) -> list[tuple[bool, bool, int]]:
    """The layers of a stage by kind: sparse or not, recomputed or not, how many."""
    if scenario.spec.experts is None:
        counts = {(False, True): again, (False, False): len(part) - again}
    else:
        counts = {}
        for index, layer in enumerate(part):
            key = scenario.spec.is_sparse(layer), index < again
            counts[key] = counts.get(key, 0) + 1
    return [(sparse, recomputed, count) for (sparse, recomputed), count in counts.items() if count]
