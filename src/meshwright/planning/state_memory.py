"""What a rank holds of parameters, gradients and optimizer state, on its chip and in host memory. No torch."""

from __future__ import annotations

from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.held_layers import stages_of
from meshwright.planning.scenario import Scenario

GIB = float(1 << 30)


def state_terms(
    scenario: Scenario, plain: float, experts: float, ends: float, largest: float, kept: float, floor: bool
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gathered ones, gradients and optimizer state."""
    layout, software = scenario.layout, scenario.software
    shards = layout.state_ranks if layout.zero else 1
    whole, own = plain + experts, plain / shards + experts * scenario.expert_share
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


def host_bytes(scenario: Scenario) -> float:
    """Host memory of a rank: the process, and what is offloaded."""
    layout = scenario.layout
    base = 4.0 * GIB if scenario.cluster.chip.key != "cpu" else 0.3 * GIB
    if layout.offload == "none":
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
    return base + most * (16 if layout.offload == "optimizer" else 20)


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
