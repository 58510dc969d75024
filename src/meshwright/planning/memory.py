"""What each pipeline rank of a scenario holds at its peak, term by term. Closed forms, no torch.

Torch's own count (allocated) is the sum of states, activations, logits and buffers; the allocator holds more
(reserved), and the driver has given out more than that (device): its context and the communicators' buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

from meshwright.planning import blocks
from meshwright.planning.compressed_memory import sendings
from meshwright.planning.head_memory import AtLoss, at_loss
from meshwright.planning.held_layers import RankLayers
from meshwright.planning.host_activations import Layers, moved
from meshwright.planning.layer_memory import LayerKept, kept_by_layer, layer_work
from meshwright.planning.scenario import Scenario
from meshwright.planning.state_memory import (
    ANY,
    END,
    GIB,
    LAYER,
    LOSS,
    Held,
    States,
    accumulates,
    host_bytes,
    on_its_way,
    state_terms,
    unit_bytes,
)

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

    def verdict_of(self, rank: int) -> str:
        """The same of one pipeline rank by itself."""
        return replace(self, stages=(self.stages[rank],), capacity=self.room(rank), capacities=()).verdict


def _casting_bytes(scenario: Scenario) -> float:
    """Of an element of the widest product that is on its way into 8 bits; compiled code has it in registers."""
    ours = scenario.software.name == "meshwright" and scenario.dtype == "fp8"
    return 4.0 if ours and not scenario.compiled else 0.0


def memory_of(scenario: Scenario, quick: bool = False, floor: bool = False) -> Memory:
    """The peaks of every pipeline rank.

    `quick` leaves out ranks that cannot be the fullest. `floor` counts of the states only the shards that a rank
    updates, which no ZeRO stage is below, and nothing that only some of them have.
    """
    info, cluster = _LayerInfo(scenario), scenario.cluster
    communicators, context = _outside(scenario)
    ranks, host = [], 0.0
    for rank in scenario.ranks(quick):
        held = _fullest(scenario, info, rank, floor)
        host = max(host, held.host)
        ranks.append(
            Terms(
                *held.states,
                *held.activations,
                *held.beside,
                buffers=held.buffers,
                fragmentation=scenario.software.fragmentation * (held.allocated - held.states[3]),
                communicators=communicators,
                context=context,
            )
        )
    return Memory(tuple(ranks), host_bytes(scenario) + host, cluster.memory, cluster.host_gib * GIB)


def does_fit(scenario: Scenario, floor: bool = False) -> bool:
    """Whether the verdict is that it fits: as `memory_of`, up to the first rank that does not."""
    info, cluster = _LayerInfo(scenario), scenario.cluster
    left_on_host = cluster.host_gib * GIB - host_bytes(scenario)
    if left_on_host < 0:
        return False
    room = FITS * cluster.memory - sum(_outside(scenario))
    spread = scenario.software.fragmentation
    for rank in scenario.ranks(quick=True):
        held = _fullest(scenario, info, rank, floor)
        if held.allocated * (1 + spread) - held.states[3] * spread > room or held.host > left_on_host:
            return False
    return True


def _outside(scenario: Scenario) -> tuple[float, float]:
    """Bytes of communicators and of the device's context, which torch does not count."""
    layout, software = scenario.layout, scenario.software
    groups = sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep))
    if scenario.cluster.chip.key == "cpu":
        return groups * CPU_GROUP_GIB * GIB, CPU_PROCESS_GIB * GIB
    return groups * software.group_gib * GIB, software.context_gib * GIB


class _LayerInfo(dict[tuple[bool, bool], tuple[LayerKept, float, blocks.Held]]):
    """For each kind of layer (a mixture or not, computed again or not): what it keeps, needs beside, and holds."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario

    def __missing__(self, key: tuple[bool, bool]) -> tuple[LayerKept, float, blocks.Held]:
        sparse, again = key
        scenario, layout = self.scenario, self.scenario.layout
        work, over_layers = layer_work(scenario, sparse), _over_layers(scenario)
        kept = kept_by_layer(over_layers, layer_work(over_layers, sparse), sparse, again)
        # The gradient of the widest product's output, beside what is kept.
        beside = work.widest * (scenario.element + _casting_bytes(scenario))
        if again:
            whole = kept_by_layer(scenario, work, sparse, False)
            beside += whole.attention + whole.feed_forward + whole.casts
        held = blocks.layer_parameters(scenario.spec, sparse, layout.tp, layout.ep, layout.expert_tp)
        self[key] = kept, beside, held
        return self[key]


def _over_layers(scenario: Scenario) -> Scenario:
    """With the rows of the busiest rank as they are over all layers that it keeps: experts that are chosen often in one
    layer are on another rank in the next, so that its sum lies nearer to the mean than its share of one layer."""
    spec = scenario.spec
    if scenario.imbalance == 1.0:
        return scenario
    mixtures = sum(spec.is_sparse(layer) for layer in range(spec.num_hidden_layers)) / scenario.layout.pp
    return replace(scenario, imbalance=1.0 + (scenario.imbalance - 1.0) / sqrt(max(1.0, mixtures)))


class _Full(NamedTuple):
    """What a rank holds at the moment when it is fullest, in bytes."""

    states: States
    activations: tuple[float, float, float]
    """Of attention, of feed-forwards, and inputs of recomputed layers."""
    beside: tuple[float, float]
    """Of the layer at work, and logits."""
    buffers: float
    host: float
    """Of its activations in host memory; not a part of what follows."""

    @property
    def allocated(self) -> float:
        """All of it."""
        return sum(self.states) + sum(self.activations) + sum(self.beside) + self.buffers


def _fullest(scenario: Scenario, info: _LayerInfo, rank: RankLayers, floor: bool) -> _Full:
    spec, layout, software = scenario.spec, scenario.layout, scenario.software
    attention = feed_forward = inputs = working = left = casts = waiting = 0.0
    plain = experts = largest = repeating = keeping = on_host = 0.0
    layers = []
    for flight, (sparse, recomputed, count) in rank.kinds:
        kept, beside, held = info[sparse, recomputed]
        times = flight * count
        layers.append(Layers(kept, beside, count, flight))
        attention += times * kept.attention
        feed_forward += times * kept.feed_forward
        inputs += times * kept.input
        casts += times * kept.casts
        plain, experts = plain + count * held.plain, experts + count * held.experts
        largest, working = max(largest, held.all), max(working, beside)
        if recomputed:
            repeating = max(repeating, beside)
        else:
            keeping = max(keeping, beside)
        left = max(left, beside + sum(kept))
        if rank.waiting:
            waiting += rank.waiting * count * layer_work(scenario, sparse).results * scenario.element
    has_first, has_last = rank.has_first, rank.has_last
    staying = None
    if layout.host_activations:
        on_host, (attention, feed_forward, inputs, casts), working, staying = moved(layers, has_last)
        keeping = repeating = 0.0
    first, last = blocks.ends_parameters(spec, layout.tp)
    ends = (first if has_first else 0.0) + (last if has_last and not (spec.tie_word_embeddings and has_first) else 0.0)
    elements = Held(plain + ends, experts, ends, largest, casts / scenario.element)
    row = scenario.tokens / (layout.tp if layout.sp else 1) * spec.hidden_size * scenario.element
    head = at_loss(scenario) if has_last else AtLoss(0.0)
    own_inputs = 2 * row if has_last else 0.0
    inputs += own_inputs
    if layout.tp > 1:
        working += scenario.tokens * spec.hidden_size * scenario.element
    activations = waiting_at_loss = attention, feed_forward, inputs
    if staying is not None:
        waiting_at_loss = staying.attention, staying.feed_forward, staying.input + own_inputs
    if not software.late_gradients:
        # Logits and the layer at work have their peaks at different times.
        beside_it = (0.0, head.logits) if head.logits > working else (working, 0.0)
        buffers = waiting + _buffers(scenario, rank, row, 0.0 if floor else largest)
        return _Full(state_terms(scenario, elements, ANY, floor), activations, beside_it, buffers, on_host)
    buffers = waiting + _buffers(scenario, rank, row, 0.0)
    if staying is not None and not has_first:
        # Inputs of a stage stay where they arrive.
        buffers += rank.held * row
    if keeping and repeating and layout.pp == 1:
        # The first layers are computed again when those behind them, which keep more, have nothing left to keep.
        working = max(keeping, repeating - attention - feed_forward)
    loss = head.logits + head.found
    full = _Full(state_terms(scenario, elements, LOSS, floor), waiting_at_loss, (0.0, loss), buffers, on_host)
    # A layer's gradients are whole when its activations are gone.
    working = max(working, 0.0 if floor else unit_bytes(scenario, largest) - left)
    if staying is not None and not floor:
        working += on_its_way(scenario, largest, len(scenario.stages[0].layers))
    if not (accumulates(scenario) or floor):
        working += head.gradient
    if working > loss or layout.zero == 3 or staying is not None:
        states = state_terms(scenario, elements, LAYER, floor)
        full = _larger(full, _Full(states, activations, (working, 0.0), buffers, on_host))
    for sending in () if floor else sendings(scenario):
        there = attention * sending.waiting, feed_forward * sending.waiting, inputs * sending.waiting
        states = state_terms(scenario, elements, LAYER, floor)
        at_work = working if sending.waiting else 0.0
        full = _larger(full, _Full(states, there, (at_work, 0.0), buffers + sending.working, on_host))
    if not accumulates(scenario):
        # Of the first layer only its own is left, and what the embedding's gradient takes is not there yet; then that
        # comes, in the dtype of computing first.
        last_comes = first if has_first and layout.state_ranks == 1 and not spec.tie_word_embeddings else 0.0
        cast = scenario.element if scenario.element < scenario.held_bytes[0] else 0
        if staying is not None:
            # As much as before, and the gradients of all layers but the first two.
            left = max(left, attention + feed_forward + inputs + casts + working - largest * scenario.held_bytes[1])
        left = max(left - last_comes * scenario.held_bytes[1], last_comes * cast)
        ending = _Full(state_terms(scenario, elements, END, floor), (0.0, 0.0, 0.0), (left, 0.0), buffers, on_host)
        full = _larger(full, ending)
    return full


def _larger(one: _Full, other: _Full) -> _Full:
    return other if other.allocated > one.allocated else one


def _buffers(scenario: Scenario, rank: RankLayers, row: float, unit: float) -> float:
    """Bytes of collectives and transfers; `unit` is the layer whose parameters and gradients are under way."""
    layout, software = scenario.layout, scenario.software
    buffers = software.bucket_gib * GIB if layout.dp > 1 else 0.0
    if layout.pp > 1:
        buffers += rank.held * (software.stage_buffers - 1) * row + 4 * row
    if layout.cp > 1:
        buffers += 4 * layer_work(scenario, False).kv_elements * scenario.element
    if layout.zero >= 2 and layout.state_ranks > 1:
        buffers += unit * (software.gather_bytes + software.reduce_bytes)
    return buffers
