"""The order of a strategy's axes over the ranks: which of them is innermost, on neighbours, which outermost. No torch.

People write it outermost first: `pp,dp,cp,tp`. Within any order a rank's number grows along every axis, as process
groups number their members. The ranks of replicate, shard and cp are also one axis together (who holds other tokens,
who shares one copy's state), so these three stay in this order among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod

from meshwright.errors import ConfigError, nearest
from meshwright.strategy import Strategy

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""In the order that needs no measurements: the heaviest traffic between neighbours, the least between the farthest."""
AUTO, IN_ORDER = "auto", "in-order"
_TOGETHER = ("replicate", "shard", "cp")
_PARTS = {"dp": ("replicate", "shard")}

Order = tuple[str, ...]
"""All axes, outermost first."""


def parse_order(text: str, strategy: Strategy) -> Order:
    """The order that parallel.placement names; raises a ConfigError that says what would be one.

    What is left to the planner is the order of `AXES` here: whoever asks the planner does so before.
    """
    if text in (AUTO, IN_ORDER):
        return AXES
    named = named_axes(text)
    missing = [axis for axis in AXES if axis not in named and getattr(strategy, axis) > 1]
    if missing:
        axis = missing[0]
        raise _refuse(text, f"{axis}={getattr(strategy, axis)} of '{strategy}' is not in it; add {axis}")
    # Where an axis of one rank lies makes no difference.
    order = (*(axis for axis in AXES if axis not in named), *named)
    if not keeps_together(order, strategy):
        raise _refuse(text, "replicate, shard and cp stay in this order, since their ranks are also one axis together")
    return order


def named_axes(text: str) -> list[str]:
    """The axes of an order that is written out, outermost first."""
    words = [word.strip() for word in text.split(",")]
    known = ("pp", "dp", "replicate", "shard", "cp", "tp")
    for word in words:
        if word not in known:
            raise _refuse(
                text, f"unknown axis '{word}'{nearest(word, known)}; write auto, in-order, or axes such as pp,dp,cp,tp"
            )
    named = [axis for word in words for axis in _PARTS.get(word, (word,))]
    twice = next((axis for axis in named if named.count(axis) > 1), None)
    if twice is not None:
        raise _refuse(text, f"{twice} is there twice; dp stands for replicate,shard")
    return named


def _refuse(text: str, why: str) -> ConfigError:
    return ConfigError(f"parallel.placement='{text}': {why}")


def keeps_together(order: Sequence[str], strategy: Strategy) -> bool:
    """Whether ranks ascend also along the axes that are made of several."""
    found = [axis for axis in order if axis in _TOGETHER and getattr(strategy, axis) > 1]
    return found == [axis for axis in _TOGETHER if axis in found]


def orders(strategy: Strategy) -> list[Order]:
    """All orders that differ for a strategy, that of `AXES` first."""
    split = [axis for axis in AXES if getattr(strategy, axis) > 1]
    alone = [axis for axis in AXES if axis not in split]
    found = [(*alone, *one) for one in permutations(split) if keeps_together(one, strategy)]
    return [AXES, *found[1:]]


def short(order: Sequence[str], strategy: Strategy) -> str:
    """What people write for an order: the axes of more than one rank."""
    split = [axis for axis in order if getattr(strategy, axis) > 1]
    text = ",".join(split)
    if strategy.replicate == 1 or strategy.shard == 1:
        text = text.replace("replicate", "dp").replace("shard", "dp")
    return text.replace("replicate,shard", "dp") or IN_ORDER


def is_plain(order: Sequence[str], strategy: Strategy) -> bool:
    """Whether ranks lie as they do without a word."""
    return [axis for axis in order if getattr(strategy, axis) > 1] == [
        axis for axis in AXES if getattr(strategy, axis) > 1
    ]


def strides(order: Sequence[str], strategy: Strategy) -> dict[str, int]:
    """How far neighbours along each axis are apart in rank numbers."""
    return {axis: prod(getattr(strategy, inner) for inner in order[place + 1 :]) for place, axis in enumerate(order)}


def ranks_in_mesh_order(order: Sequence[str], strategy: Strategy) -> list[int]:
    """The ranks as the mesh lists them: with the axes as in `AXES`, the last one running fastest."""
    step, found = strides(order, strategy), [0]
    for axis in AXES:
        found = [rank + index * step[axis] for rank in found for index in range(getattr(strategy, axis))]
    return found
