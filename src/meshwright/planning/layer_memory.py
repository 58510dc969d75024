"""What one layer keeps of one micro-batch for its backward pass. Closed forms, no torch."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planning import blocks
from meshwright.planning.blocks import Work
from meshwright.planning.compiled import compiled_layer
from meshwright.planning.scenario import Scenario


class LayerKept(NamedTuple):
    """Bytes that one layer keeps of one micro-batch."""

    attention: float
    """With the norms."""
    feed_forward: float
    input: float = 0.0
    """All that a recomputed layer keeps."""
    casts: float = 0.0
    """Weights in the dtype of computing, which our own trainer makes of wider ones."""


def kept_by_layer(scenario: Scenario, work: Work, sparse: bool, again: bool) -> LayerKept:
    """What a layer keeps, computed again as a whole or not."""
    element = scenario.element
    if again:
        return LayerKept(0.0, 0.0, work.input * element)
    if scenario.compiled:
        found = compiled_layer(scenario, work, sparse)
        return LayerKept(found.attention, found.feed_forward, 0.0, found.casts)
    if scenario.selective and scenario.flash_attention:
        inner = work.saved_inner * 2
        share = scenario.software.selective_saved
        return LayerKept((work.saved_selective - inner) * share * element + work.saved_bytes, inner * share * element)
    gathered = work.gathered if scenario.software.gathered_saved else 0.0
    scores = 0.0 if scenario.flash_attention or scenario.selective else 5.0 * work.scores
    # Dense feed-forwards that are not gated keep two inner tensors, which `saved` holds already.
    inner = work.saved_inner * scenario.software.mlp_saved
    if scenario.software.narrow_saved and scenario.dtype != scenario.wide:
        # Inputs of products are kept as they were cast: half as wide, or a quarter with their scales.
        less = work.cast * (0.5 if scenario.dtype == "fp8" else 0.7)
        return LayerKept((work.saved - less) * element + work.saved_bytes + scores, inner * element)
    attention = (work.saved + gathered) * element + work.saved_bytes + scores
    return LayerKept(attention, inner * element, 0.0, _casts_of_experts(scenario, sparse))


def _casts_of_experts(scenario: Scenario, sparse: bool) -> float:
    """Linears round their weights whenever they need them; products of groups keep what they were given."""
    if not (sparse and scenario.rounds_weights):
        return 0.0
    layout = scenario.layout
    held = blocks.layer_parameters(scenario.spec, sparse, layout.tp, layout.ep, layout.expert_tp)
    return held.experts * scenario.element


def layer_work(scenario: Scenario, sparse: bool) -> Work:
    """What a layer computes and keeps of one micro-batch."""
    layout = scenario.layout
    return blocks.layer_work(
        scenario.spec, sparse, scenario.tokens, scenario.sequence_length,
        layout.tp, layout.sp, layout.ep, layout.expert_tp, scenario.imbalance,
    )  # fmt: skip
