"""Activations that wait in host memory: how many bytes are where, and how long they are on their way. No torch.

The device holds what two layers keep, of the one at work and of its neighbour; the model's last layer stays on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.planning.held_layers import Stage
from meshwright.planning.layer_memory import LayerKept, kept_by_layer, layer_work
from meshwright.planning.scenario import Scenario
from meshwright.planning.state_times import HOST_LINK

ROUNDED = 1.125
"""Buffers in host memory are larger than what they hold by at most an eighth."""


class Layers(NamedTuple):
    """Layers that are alike, on one pipeline rank."""

    kept: LayerKept
    """By one of them, of one micro-batch."""
    beside: float
    """Bytes that one needs beside, at work."""
    number: int
    flight: int
    """Micro-batches that are held at once."""


class Moved(NamedTuple):
    """What a pipeline rank holds where."""

    host: float
    """Bytes in host memory."""
    working: LayerKept
    """On the device, while the layer that needs the most is at work."""
    beside: float
    """What that layer needs beside."""
    at_loss: LayerKept
    """On the device at the loss."""


def moved(layers: Sequence[Layers], has_last: bool) -> Moved:
    """What a pipeline rank with these layers holds; they are in the model's order."""
    most = max(layers, key=lambda one: 2 * sum(one.kept) + one.beside)
    few = sum(one.number * one.flight for one in layers)
    last = layers[-1].kept if has_last else LayerKept(0.0, 0.0)
    total = sum(sum(one.kept) * one.number * one.flight for one in layers)
    two = LayerKept(*(min(2, few) * size for size in most.kept))
    return Moved((total - sum(last)) * ROUNDED, two, most.beside, last)


def one_way(scenario: Scenario, stage: Stage) -> float:
    """Bytes of a micro-batch that a stage sends to host memory, and gets back."""
    total = last = 0.0
    for sparse, again, number in stage.kinds:
        last = sum(kept_by_layer(scenario, layer_work(scenario, sparse), sparse, again))
        total += number * last
    has_last = stage.layers.stop == scenario.spec.num_hidden_layers
    return total - last if has_last else total


def exposed(scenario: Scenario, stage: Stage, forward: float, backward: float) -> tuple[float, float]:
    """Seconds by which a stage's passes of a micro-batch are longer than what they compute: a copy runs beside the next
    layer, so a pass takes as long as the copies if these are slower. The first that comes back is waited for."""
    if not scenario.layout.host_activations:
        return 0.0, 0.0
    seconds = one_way(scenario, stage) / HOST_LINK
    return max(0.0, seconds - forward), max(seconds / len(stage.layers), seconds - backward)
