"""What a rank holds of parameters, gradients and optimizer state, on its chip and in host memory. No torch."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from meshwright.cuts import SMALL_UNIT
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.held_layers import RankLayers, stages_of
from meshwright.planning.scenario import Scenario

GIB = float(1 << 30)
UNSENT_BYTES = 4
"""Of a gradient that was not sent yet."""


LOSS, LAYER, END, ANY = "loss", "layer", "end", "any"
"""Moments of a micro-step: at the loss; in the last layer's backward pass; when the backward pass ends; all at once."""
States = tuple[float, float, float, float]
"""Bytes of parameters, gathered ones, gradients and optimizer state."""


class Held(NamedTuple):
    """Elements that a rank has before sharding."""

    plain: float
    """With those of both ends of the model."""
    experts: float
    ends: float
    largest: float
    """Of one layer."""
    cast: float
    """Of those whose cast is kept for the backward pass, as often as it is kept."""


def accumulates(scenario: Scenario) -> bool:
    """Whether a micro-step finds gradients, of those before it or in buckets that are never given back."""
    layout = scenario.layout
    buckets = layout.zero < 2 and layout.dp * layout.cp > 1 and layout.tp == layout.pp == layout.ep == 1
    return buckets or layout.pp > 1 or scenario.micro_steps > 1


def state_terms(scenario: Scenario, held: Held, moment: str, floor: bool) -> States:
    """What a rank has at a moment of its last micro-step; `floor`: of any ZeRO stage."""
    layout, software = scenario.layout, scenario.software
    shards = layout.state_ranks if layout.zero else 1
    whole, own = held.plain + held.experts, held.plain / shards + held.experts * scenario.expert_share
    wide, gradient, moments = scenario.held_bytes
    optimizer = own * moments if layout.host_states == "none" else 0.0
    stored = own * wide if layout.host_states != "parameters" else 0.0
    there = moment in (ANY, END) or accumulates(scenario)
    if floor:
        return stored, 0.0, own * gradient * there, optimizer
    narrow = scenario.element
    if layout.zero < 2 or layout.state_ranks == 1:
        casts = (whole if scenario.is_replicated else held.cast) * narrow * (moment != END)
        if not layout.zero:
            optimizer = whole * moments * (layout.host_states == "none") + unsent_bytes(scenario, whole)
        return whole * wide, casts, whole * gradient * there, optimizer
    if software.late_gradients:
        return (stored, *_our_shards(scenario, held, moment, own * gradient * there, there), optimizer)
    if layout.zero == 2:
        gradients = (own + held.largest) * gradient
        if software.parameter_bytes == 2:
            return whole * wide, 0.0, gradients, optimizer
        return stored, whole * narrow, gradients, optimizer
    gathered = min(whole, held.ends + 2 * held.largest) * narrow
    return stored, gathered, own * gradient + held.largest * software.reduce_bytes, optimizer


def _our_shards(scenario: Scenario, held: Held, moment: str, own: float, there: bool) -> tuple[float, float]:
    """Gathered parameters and gradients of our own trainer with zero=2 and 3; `own` are this rank's sums."""
    layout, software, whole = scenario.layout, scenario.software, held.plain + held.experts
    units = 0.0 if moment == LOSS else 2 * held.largest
    gathered = (whole if layout.zero == 2 else min(whole, held.ends + units)) * scenario.element
    if layout.pp > 1:
        # The pipeline adds gradients up whole and scatters them at the end.
        return gathered, whole * scenario.held_bytes[1]
    # What the root has sent is kept until the next backward pass sends something.
    return gathered, own + held.ends * software.reduce_bytes * there


class UpdateStates(NamedTuple):
    """Bytes of what a rank holds of the model's state when all gradients are there and the update comes."""

    parameters: float
    gradients: float
    optimizer: float


def update_states(scenario: Scenario, rank: RankLayers) -> UpdateStates:
    """What a pipeline rank holds then: its own shards and no more, whatever the passes have had in hand."""
    layout, spec = scenario.layout, scenario.spec
    first, last = blocks.ends_parameters(spec, layout.tp)
    plain = (first if rank.has_first else 0.0) + (
        last if rank.has_last and not (spec.tie_word_embeddings and rank.has_first) else 0.0
    )
    experts = 0.0
    for _, (sparse, _, count) in rank.kinds:
        held = blocks.layer_parameters(spec, sparse, layout.tp, layout.ep, layout.expert_tp)
        plain, experts = plain + count * held.plain, experts + count * held.experts
    parameters, _, gradients, optimizer = state_terms(scenario, Held(plain, experts, 0.0, 0.0, 0.0), END, False)
    if layout.zero >= 2 and layout.state_ranks > 1:
        own = plain / layout.state_ranks + experts * scenario.expert_share
        gradients = own * scenario.held_bytes[1]
    unsent = 0.0 if layout.zero else unsent_bytes(scenario, plain + experts)
    return UpdateStates(parameters, gradients, optimizer - unsent)


def unsent_bytes(scenario: Scenario, elements: float) -> float:
    """What a rank keeps of compressed gradients that it did not send."""
    return UNSENT_BYTES * elements if scenario.layout.compression.remembers else 0.0


def unit_bytes(scenario: Scenario, largest: float) -> float:
    """Gradients of one layer on their way into shards, as our trainer has them: computed, and cast to be sent."""
    layout = scenario.layout
    if layout.zero < 2 or layout.state_ranks == 1 or layout.pp > 1:
        return 0.0
    return largest * (scenario.software.reduce_bytes + scenario.element)


def on_its_way(scenario: Scenario, largest: float, layers: int) -> float:
    """What our trainer holds of a unit's gradients on their way, while the next is at work: then one is gathered."""
    layout = scenario.layout
    if layout.zero < 2 or layout.state_ranks == 1 or layout.pp > 1:
        return 0.0
    unit = largest * min(layers, ceil(SMALL_UNIT / largest))
    return unit * scenario.software.reduce_bytes - (2 * largest - unit) * scenario.element * (layout.zero == 3)


def host_bytes(scenario: Scenario) -> float:
    """Host memory of a rank: the process, and what is offloaded."""
    layout = scenario.layout
    base = 4.0 * GIB if scenario.cluster.chip.key != "cpu" else 0.3 * GIB
    if layout.host_states == "none":
        return base
    shards = layout.state_ranks if layout.zero else 1
    most = _fullest_shard(
        scenario.spec,
        layout.pp,
        layout.schedule,
        layout.layers,
        layout.tp,
        layout.ep,
        layout.expert_tp,
        shards,
        scenario.expert_share,
    )
    # Moments, the copy that is updated, and gradients on their way; with parameters those too.
    parameter, gradient, moments = scenario.held_bytes
    return base + most * (moments + parameter + gradient + (parameter if layout.host_states == "parameters" else 0.0))


@blocks.remembered
def _fullest_shard(
    spec: ModelSpec,
    pp: int,
    schedule: str,
    layers: str,
    tp: int,
    ep: int,
    expert_tp: int,
    shards: int,
    expert_share: float,
) -> float:
    """Elements that the fullest rank updates."""
    totals = [0.0] * pp
    for stage in stages_of(spec, pp, schedule, layers, 0):
        for layer in stage.layers:
            held = blocks.layer_parameters(spec, spec.is_sparse(layer), tp, ep, expert_tp)
            totals[stage.rank] += held.plain / shards + held.experts * expert_share
    return max(totals) + sum(blocks.ends_parameters(spec, tp)) / shards
