"""Bytes of parameters, gradients and optimizer state that a rank holds, exactly, by strategy; no torch.

A test holds these numbers against what a training step holds at its peak, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.estimate.units import FIRST, Place, Unit, Units, units_of
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds at its peak within a step."""

    parameters: int
    """As they are stored: whole, or in shards with their padding."""
    gathered: int
    """Gathered from other ranks for computing, on top of what is stored."""
    gradients: int
    optimizer: int
    """Two moments of every element that this rank updates, with their scales where they are 8 bits."""


def state_bytes(
    spec: ModelSpec,
    strategy: Strategy,
    place: Place = FIRST,
    *,
    micro_steps: int = 1,
    kept: Kept = FLOAT32,
    computed: int | None = None,
) -> StateBytes:
    """The state of the rank at that place; `computed` are the bytes of an element that is computed with."""
    units = units_of(spec, strategy, place)
    held = [one for unit in units.all for one in unit.values()]
    stored = kept.element
    local, padded = (sum(getattr(one, name) for one in held) for name in ("local", "padded"))
    if strategy.zero < 2 or strategy.dp * strategy.cp == 1:
        moments = kept.moments_of(one.shard if strategy.zero == 1 else one.local for one in held)
        return StateBytes(local * stored, 0, local * stored, moments)
    return StateBytes(
        parameters=padded * stored,
        gathered=_gathered(units, strategy) * (computed or stored),
        gradients=_gradients(units, strategy, micro_steps) * stored,
        optimizer=kept.moments_of(one.shard for one in held),
    )


def _gathered(units: Units, strategy: Strategy) -> int:
    """Zero=2 keeps everything gathered. With zero=3 the root stays, and the layers take turns, with their experts.

    What is under way to the next one lies in a buffer of the collective, which is no parameter yet.
    """
    if strategy.zero == 2:
        return sum(map(_whole, units.all))
    turns = [_whole(unit) + max(map(_whole, units.experts_of(unit)), default=0) for unit in units.layers]
    alone = max(map(_whole, units.experts_of(units.root)), default=0)
    return _whole(units.root) + max([alone, *turns])


def _whole(unit: Unit) -> int:
    return sum(one.shards * one.padded for one in unit.values())


def _local(unit: Unit) -> int:
    return sum(one.local for one in unit.values())


def _padded(unit: Unit) -> int:
    return sum(one.padded for one in unit.values())


def _gradients(units: Units, strategy: Strategy, micro_steps: int) -> int:
    """The most elements of gradients at once where they are scattered unit by unit, the last layer first.

    Gradients of the root come first (head, last norm) and last (embeddings), and are scattered at the very end. From
    the second micro-step on, the shards of the first one are there all the time. A pipeline adds them up whole, and
    scatters them when all micro-steps are done.
    """
    if strategy.pp > 1:
        return sum(map(_local, units.all))
    early = sum(one.local for name, one in units.root.items() if not name.startswith("model.embed"))
    kept = sum(map(_padded, units.all)) if micro_steps > 1 else 0
    scattered, most = 0, 0
    for layer in reversed(units.layers):
        most = max(most, early + scattered + _local(layer))
        scattered += 0 if kept else _padded(layer)
    return kept + max(most, _local(units.root) + scattered)
