"""The nearest strategy for the ranks that are left: what is asked for, with as little changed as they allow.

Copies come and go first (dp, replicate, shard): that changes nothing of what a rank has to hold. Only when no number
of copies fits are the degrees reduced that split the model, by as little as possible. The global batch stays as it is,
so a number of ranks that cannot share it leaves some of them idle. Unequal shares of it belong to the ranks for which
they were written: other numbers of copies share it evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from meshwright.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy
from meshwright.strategy_fit import divisors

SPLITS = ("tp", "ep", "cp", "pp")
"""Degrees that split the model, in the order in which they are kept."""


@dataclass(frozen=True)
class Replanned:
    """A strategy for some ranks, and what was changed for it."""

    strategy: Strategy
    change: str | None
    """In a sentence; None when it is what was asked for on all ranks."""


def replan(
    text: str,
    spec: ModelSpec,
    world: int,
    batches: Iterable[int],
    *,
    micro_batch: int | None = None,
    sequence_length: int | None = None,
    optimizer: str = "adamw",
    check: Callable[[Strategy], object] = lambda strategy: None,
) -> Replanned:
    """The nearest legal strategy to a short form on at most that many ranks; the same for the same arguments.

    `check` raises a ConfigError for what other settings refuse.
    """
    sizes = sorted(set(batches))
    exact = Strategy.processes(text)
    asked = Strategy.parse(text, exact or Strategy.fewest_processes(text))
    most = asked.dp if exact else world

    def legal(strategy: Strategy) -> bool:
        try:
            strategy.check(spec, strategy.world, sequence_length, optimizer)
            check(strategy)
            for size in sizes:
                strategy.micro_steps(size, micro_batch)
        except ConfigError:
            return False
        return True

    for splits in _splits(asked):
        ranks_a_copy = splits["tp"] * splits["cp"] * splits["pp"]
        for dp in range(min(most, world // ranks_a_copy), 0, -1):
            for strategy in _candidates(asked, splits, dp, exact is None, exact is None and asked.shard == 1):
                if legal(strategy):
                    return Replanned(strategy, _change(asked, strategy, world, exact is None))
    # Nothing fits, not even on one rank: what is wrong with what was asked for is the thing to tell.
    asked.check(spec, asked.world, sequence_length, optimizer)
    check(asked)
    for size in sizes:
        asked.micro_steps(size, micro_batch)
    raise ConfigError(f"parallel.strategy='{text}' needs {asked.world} processes and there are {world}; start more")


def _splits(asked: Strategy) -> Iterator[dict[str, int]]:
    """What tp, ep, cp and pp may become, the least change first."""
    choices = [
        dict(zip(SPLITS, degrees, strict=True))
        for degrees in product(*(divisors(getattr(asked, key)) for key in SPLITS))
    ]

    def cost(splits: dict[str, int]) -> tuple[float, int, tuple[float, ...]]:
        factors = tuple(getattr(asked, key) / splits[key] for key in SPLITS)
        reduction = 1.0
        for factor in factors:
            reduction *= factor
        return reduction, sum(factor > 1 for factor in factors), factors

    yield from sorted(choices, key=cost)


def _candidates(
    asked: Strategy, splits: dict[str, int], dp: int, open_dp: bool, open_shard: bool
) -> Iterator[Strategy]:
    """Strategies with these degrees, the nearest first."""
    words: dict[str, Any] = {**splits, "sp": asked.sp and splits["tp"] > 1}
    if splits["pp"] != asked.pp:
        words["layers"] = asked.layers if asked.layers == "balanced" and splits["pp"] > 1 else "even"
    if splits["pp"] == 1:
        words["schedule"] = "1f1b"
    if splits["cp"] == 1:
        words["cp_method"] = "ring"
    if asked.host_states == "parameters" and dp * splits["cp"] == 1:
        words["offload"] = asked.offload.replace("parameters", "optimizer")
    methods = [words] if splits["cp"] in (1, asked.cp) else [words, words | {"cp_method": "ring"}]
    # Where dp was left open, shares were written for any number of copies.
    shares = [asked.shares] if asked.shares == "even" or dp == asked.dp or open_dp else []
    choices = product(dict.fromkeys([*shares, "even"]), _shards(asked, dp, open_shard), methods)
    for share, shard, method in choices:
        try:
            yield replace(asked, **method, shard=shard, replicate=dp // shard, shares=share)
        except ConfigError:
            continue


def _shards(asked: Strategy, dp: int, open_shard: bool) -> list[int]:
    """How many ranks may share a copy: as many as asked, else more (a rank holds less), else fewer."""
    if asked.zero == 0:
        return [1]
    wanted = asked.shard
    if open_shard or asked.replicate == 1:
        wanted = dp // asked.replicate if dp % asked.replicate == 0 else dp
    return sorted(divisors(dp), key=lambda shard: (shard < wanted, abs(shard - wanted)))


def _change(asked: Strategy, found: Strategy, world: int, any_copies: bool) -> str | None:
    """What is different, and who has nothing to do."""
    idle = world - found.world
    keys = ("dp", "replicate", "shard", *SPLITS, "layers", "schedule", "cp_method", "offload", "shares")
    changed = [
        f"{key} {getattr(asked, key)} -> {getattr(found, key)}"
        for key in keys
        if getattr(asked, key) != getattr(found, key) and not (any_copies and key in ("dp", "replicate", "shard"))
    ]
    parts = [f"{', '.join(changed)}"] if changed else []
    if idle:
        parts.append(f"{idle} of {world} ranks stay idle, since they cannot share the batch or the model evenly")
    return f"{found} on {world} ranks: {'; '.join(parts)}" if parts else None
