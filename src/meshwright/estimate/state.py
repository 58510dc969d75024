"""Bytes of parameters, gradients and optimizer state that a rank holds, exactly, by strategy; no torch.

A test holds these numbers against what a training step holds at its peak, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.cuts import longest_part, part_length
from meshwright.estimate.units import Unit, check_known, units_of
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
    """Two moments of every element that this rank updates."""


@dataclass(frozen=True)
class _Held:
    """One parameter on one rank: its part under tensor parallel, and the shards of that."""

    local: int
    """Elements of the part that tensor parallel leaves."""
    shard: int
    """Elements of this rank's shard of it."""
    padded: int
    """Elements of a shard with its padding; the same on every rank."""


def state_bytes(
    spec: ModelSpec,
    strategy: Strategy,
    *,
    shard_rank: int = 0,
    tp_rank: int = 0,
    micro_steps: int = 1,
    stored: int = 4,
    computed: int | None = None,
) -> StateBytes:
    """The state of the rank at that place; `stored` and `computed` are bytes per element, float32 unless told."""
    check_known(strategy)
    layers, root = units_of(spec, strategy, tp_rank)
    blocks, rest = [[_shards(unit, strategy.shard, shard_rank) for unit in kind] for kind in (layers, [root])]
    held = [one for unit in (*blocks, *rest) for one in unit.values()]
    local, own, padded = (sum(getattr(one, name) for one in held) for name in ("local", "shard", "padded"))
    if strategy.zero < 2 or strategy.dp == 1:
        moments = own if strategy.zero == 1 else local
        return StateBytes(local * stored, 0, local * stored, 2 * moments * stored)
    of_blocks, (of_root,) = [
        [strategy.shard * sum(one.padded for one in unit.values()) for unit in kind] for kind in (blocks, rest)
    ]
    # Zero=3: the root stays gathered, and the layers take turns. What is under way to the next one lies in a buffer of
    # the collective, which is no parameter yet.
    together = sum(of_blocks) if strategy.zero == 2 else max(of_blocks, default=0)
    return StateBytes(
        parameters=padded * stored,
        gathered=(of_root + together) * (computed or stored),
        gradients=_gradients(blocks, rest[0], micro_steps) * stored,
        optimizer=2 * own * stored,
    )


def _shards(unit: Unit, shard: int, rank: int) -> dict[str, _Held]:
    held = {}
    for name, (rows, *inner) in unit.items():
        row = prod(inner)
        held[name] = _Held(rows * row, part_length(rows, shard, rank) * row, longest_part(rows, shard) * row)
    return held


def _gradients(blocks: list[dict[str, _Held]], root: dict[str, _Held], micro_steps: int) -> int:
    """The most elements of gradients at once where they are scattered unit by unit, the last layer first.

    Gradients of the root come first (head, last norm) and last (embeddings), and are scattered at the very end. From
    the second micro-step on, the shards of the first one are there all the time.
    """
    early = sum(one.local for name, one in root.items() if not name.startswith("model.embed"))
    kept = sum(one.padded for unit in (*blocks, root) for one in unit.values()) if micro_steps > 1 else 0
    scattered, most = 0, 0
    for block in reversed(blocks):
        most = max(most, early + scattered + sum(one.local for one in block.values()))
        scattered += 0 if kept else sum(one.padded for one in block.values())
    return kept + max(most, sum(one.local for one in root.values()) + scattered)
