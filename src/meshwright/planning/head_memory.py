"""What the head has in memory while it computes the loss. Closed forms, no torch."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from meshwright.models.logit_chunks import chunk_tokens
from meshwright.planning.scenario import Scenario


class AtLoss(NamedTuple):
    """Bytes on a rank that has the head."""

    logits: float
    found: float = 0.0
    """Our own: gradients of the head's inputs and of its weight, which the forward pass finds, and a narrow weight."""
    gradient: float = 0.0
    """Of these the weight's gradient, as the backward pass of the layers finds it."""


def at_loss(scenario: Scenario) -> AtLoss:
    """What the loss of one micro-batch takes."""
    spec, layout, software = scenario.spec, scenario.layout, scenario.software
    tokens, entries = scenario.tokens, spec.vocab_size / layout.tp
    if software.name != "meshwright":
        return AtLoss(tokens * entries * software.logit_bytes / scenario.loss_chunks)
    element, weights = scenario.element, entries * spec.hidden_size
    chunk = min(tokens, chunk_tokens(ceil(entries), element))
    logits = chunk * entries * _logit_bytes(scenario)
    # Beside the float32 sum of the weight's gradient, the weight in the dtype of computing, or its gradient in that.
    narrow = element if element < 4 else 0
    on_cpu = scenario.cluster.chip.key == "cpu"
    # Products that cannot add to a sum in float32 have a result of their own.
    product = element if on_cpu else 0
    inputs = tokens * spec.hidden_size * element
    return AtLoss(logits, inputs + weights * (4 + narrow + product), weights * scenario.held_bytes[1])


def _logit_bytes(scenario: Scenario) -> float:
    """Of one logit at the peak: a GPU's kernel overwrites it, unless ranks have to agree in between."""
    narrow = scenario.element < 4
    if narrow and scenario.layout.tp == 1 and scenario.cluster.chip.key != "cpu":
        return 2.0
    # As it came, in float32, and its exponential; in float32 the first two are one.
    return 10.0 if narrow else 8.0
