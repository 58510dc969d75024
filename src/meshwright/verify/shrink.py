"""A strategy and a shape made small enough for this machine, with what matters to a split left as it is. No torch.

Sizes shrink, relations stay: heads to key-value heads and both to the ranks that share them, remainders of what is cut,
dense and sparse layers, more experts than a token visits, a window shorter than the sequence. Degrees stay too, unless
there would be more than `MOST_RANKS` processes; then copies, shards, stages and parts are two where they were more, and
what several ranks shared they still share.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from meshwright.context_layout import ContextLayout
from meshwright.cuts import SMALL_UNIT
from meshwright.errors import ConfigError
from meshwright.models.count import count_parameters
from meshwright.models.spec import Experts, ModelSpec
from meshwright.schedules import stages_per_rank
from meshwright.strategy import Strategy

MOST_RANKS = 16
"""Local processes of a proof, at most."""
_MOST_QUERIES = 8
"""Query heads for each key-value head, at most, unless the ranks need more."""


@dataclass(frozen=True)
class Small:
    """What is run in place of what was asked for, and in which way it differs."""

    strategy: Strategy
    spec: ModelSpec | None
    notes: tuple[str, ...]


def asked_strategy(text: str) -> tuple[Strategy, tuple[str, ...]]:
    """The strategy of a short form with as few processes as show what it does, and what was filled in or left out."""
    strategy, notes = _filled_in(text)
    if strategy.compress != "none":
        notes += (f"compress={strategy.compress} is left out: it computes something near on purpose",)
        strategy = replace(strategy, compress="none")
    return strategy, notes


def _filled_in(text: str) -> tuple[Strategy, tuple[str, ...]]:
    world = Strategy.processes(text)
    if world:
        return Strategy.parse(text, world), ()
    refusal: ConfigError | None = None
    found: list[Strategy] = []
    for factor in (1, 2, 4, 8, MOST_RANKS):
        try:
            found.append(Strategy.parse(text, factor * Strategy.fewest_processes(text)))
        except ConfigError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None
        raise refusal
    # One process shows nothing, and shards of one rank show nothing.
    telling = [strategy for strategy in found if strategy.world > 1 and not (strategy.zero and strategy.shard == 1)]
    chosen = (telling or found)[0]
    return chosen, (f"dp is left open and taken as {chosen.dp}",)


def shrink(strategy: Strategy, spec: ModelSpec | None) -> Small:
    """What to run here for a strategy that the full shape can take; a module that is no decoder has no shape."""
    notes = []
    fewer = _small_shares(_fewer_ranks(strategy))
    for key in ("dp", "ep", "pp", "cp", "tp", "shares"):
        before, after = getattr(strategy, key), getattr(fewer, key)
        if before != after:
            notes.append(f"{key}={before} is proved as {key}={after}")
    if spec is None:
        return Small(fewer, None, tuple(notes))
    small = small_spec(spec, fewer, strategy)
    fitted = _fitted(fewer, spec, small)
    for key in ("layers", "cp_method", "recompute", "wrap"):
        before, after = getattr(strategy, key), getattr(fitted, key)
        if before != after:
            notes.append(f"{key}={before} is proved as {key}={after}")
    fitted.check(small, fitted.world, tokens_of(fitted))
    return Small(fitted, small, tuple(notes))


def tokens_of(strategy: Strategy) -> int:
    """A short sequence that the strategy can deal out."""
    unit = 2 * strategy.tp * strategy.cp
    return _multiple(16, unit)


def micro_steps_of(strategy: Strategy) -> int:
    """Accumulation, and enough micro-batches to fill a pipeline."""
    return max(2, 2 * strategy.pp if strategy.pp > 1 else 2)


def samples_of(strategy: Strategy) -> int:
    """Samples of a step: a few in every micro-step, the same number for every share."""
    shares = strategy.all_shares
    return micro_steps_of(strategy) * shares * max(1, 4 // shares)


def _fewer_ranks(strategy: Strategy) -> Strategy:
    """Degrees lowered one after the other, each to the smallest that still shows what it does, until there are few."""
    for lower in (_fewer_copies, _fewer_experts, _fewer_copies, _fewer_stages, _fewer_tokens, _fewer_parts):
        if strategy.world <= MOST_RANKS:
            return strategy
        strategy = lower(strategy)
    if strategy.world > MOST_RANKS:
        raise ConfigError(
            f"'{strategy}' takes {strategy.world} processes even with its smallest degrees, "
            f"and a proof runs {MOST_RANKS} at most; prove it in parts, with fewer keys at a time"
        )
    return strategy


def _small_shares(strategy: Strategy) -> Strategy:
    """Shares of one and two: the smallest stay the smallest."""
    parts = strategy.data_shares
    if max(parts) <= 3:
        return strategy
    return replace(strategy, shares="+".join("1" if part == min(parts) else "2" for part in parts))


def _fewer_copies(strategy: Strategy) -> Strategy:
    """Two copies and two shards where there were more."""
    if strategy.ep > 1:
        return _dealt_out(strategy, strategy.ep)
    return _copies(strategy, replicate=min(2, strategy.replicate), shard=min(2, strategy.shard))


def _fewer_experts(strategy: Strategy) -> Strategy:
    if strategy.ep == 1:
        return strategy
    return _dealt_out(strategy, min(ep for ep in strategy.expert_degrees if ep > 1))


def _dealt_out(strategy: Strategy, ep: int) -> Strategy:
    """Experts over that many ranks, and as few data ranks as keep two copies and two shards where there were more."""
    several, in_shards = strategy.dp > strategy.ep, strategy.shard % strategy.ep == 0
    options = [
        (replicate, shard)
        for replicate in range(1, strategy.replicate + 1)
        for shard in range(1, strategy.shard + 1)
        if (replicate > 1) == (strategy.replicate > 1)
        and (shard > 1) == (strategy.shard > 1)
        and replicate * shard % ep == 0
        and (replicate * shard > ep) == several
        and (shard % ep == 0) == in_shards
        and (in_shards or ep % shard == 0)
        and (not in_shards or (shard > ep) == (strategy.shard > strategy.ep))
    ]
    if not options:
        return strategy
    replicate, shard = min(options, key=lambda option: option[0] * option[1])
    return _copies(strategy, replicate=replicate, shard=shard, ep=ep)


def _copies(strategy: Strategy, replicate: int, shard: int, ep: int = 1) -> Strategy:
    """With other numbers of data ranks; where their shares differ, those of the first and the others do."""
    fewer = replicate * shard
    shares = strategy.shares if strategy.shares == "even" or fewer == strategy.dp else _first_more(fewer)
    return replace(strategy, replicate=replicate, shard=shard, ep=ep, shares=shares)


def _first_more(count: int) -> str:
    return "+".join(["2", *["1"] * (count - 1)]) if count > 1 else "even"


def _fewer_stages(strategy: Strategy) -> Strategy:
    if strategy.pp <= 2:
        return strategy
    # Sizes by hand are brought down to the small shape later; here they only have to be as many as the stages.
    layers = strategy.layers if strategy.layers in ("even", "balanced") else _uneven(2, strategy)
    return replace(strategy, pp=2, layers=layers)


def _uneven(pp: int, strategy: Strategy) -> str:
    return _first_more(pp * stages_per_rank(strategy.schedule))


def _fewer_tokens(strategy: Strategy) -> Strategy:
    if strategy.cp <= 2:
        return strategy
    kind, colon, _ = strategy.cp_method.partition(":")
    layout = ContextLayout.of(strategy.cp, strategy.cp_method)
    members = min(2, layout.heads)
    method = f"{kind}:{members}" if colon else kind
    return replace(strategy, cp=min(2, layout.ring) * members, cp_method=method)


def _fewer_parts(strategy: Strategy) -> Strategy:
    return replace(strategy, tp=min(2, strategy.tp))


def small_spec(spec: ModelSpec, strategy: Strategy, asked: Strategy | None = None) -> ModelSpec:
    """A small shape that the strategy cuts in the same way as what was asked for cuts the full one."""
    tp, pieces = strategy.tp, strategy.tp * strategy.shard
    heads, kv_heads = _heads(spec, strategy, asked or strategy)
    head_dim = min(spec.head_dim, 8 if heads <= 16 else 4)
    width = heads * head_dim
    if spec.num_attention_heads * spec.head_dim != spec.hidden_size:
        width = min(
            spec.hidden_size, _multiple(width * spec.hidden_size // (spec.num_attention_heads * spec.head_dim), 4)
        )
        width += 4 * (width == heads * head_dim)
    tokens = tokens_of(strategy)
    changes = {
        "vocab_size": _same_remainder(spec.vocab_size, 96, pieces),
        "hidden_size": width,
        "intermediate_size": _same_remainder(spec.intermediate_size, 2 * width, pieces),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": _layers(spec, strategy),
        "max_position_embeddings": min(spec.max_position_embeddings, 2 * tokens),
        "sliding_window": spec.sliding_window and min(spec.sliding_window, tokens // 2 - 1),
        # As strong as in the full model, so that every part of it matters.
        "initializer_range": spec.initializer_range * math.sqrt(spec.hidden_size / width),
        "experts": spec.experts and _experts(spec.experts, width, tp, strategy.ep),
    }
    return ModelSpec.model_validate(spec.model_dump() | {"experts": None} | changes)


def _heads(spec: ModelSpec, strategy: Strategy, asked: Strategy) -> tuple[int, int]:
    """Query and key-value heads: where a rank has several of the latter, two are as good; shared ones stay shared."""
    ways, asked_ways = _ways(strategy), _ways(asked)
    all_heads, all_kv = spec.num_attention_heads, spec.num_key_value_heads
    if all_kv % asked_ways == 0:
        kv_heads = ways * min(2, all_kv // asked_ways)
    elif asked_ways % all_kv == 0:
        kv_heads = max(1, ways // (asked_ways // all_kv))
    else:
        kv_heads = all_kv
    queries = all_heads // all_kv
    legal = [
        n for n in range(1, queries + 1) if queries % n == 0 and kv_heads * n % ways == 0 and (n > 1 or queries == 1)
    ]
    fitting = [n for n in legal if n <= _MOST_QUERIES] or legal[:1] or [queries]
    return kv_heads * fitting[-1], kv_heads


def _ways(strategy: Strategy) -> int:
    """Over how many ranks heads are dealt out."""
    return strategy.tp * ContextLayout.of(strategy.cp, strategy.cp_method).heads


def _layers(spec: ModelSpec, strategy: Strategy) -> int:
    """At least two, a layer of every kind, and as many as the stages need, with the same remainder."""
    stages = strategy.pp * stages_per_rank(strategy.schedule) if strategy.pp > 1 else 1
    least = 2
    if spec.experts is not None:
        least = max(least, min(spec.experts.first_k_dense_replace, 1) + min(spec.experts.decoder_sparse_step, 2))
    if strategy.pp > 1 and strategy.layers not in ("even", "balanced"):
        return max(sum(_small_stages(strategy.layers)), least)
    return min(spec.num_hidden_layers, _multiple(least, stages) + spec.num_hidden_layers % stages)


def _small_stages(layers: str) -> list[int]:
    """Sizes of stages given by hand, as one and two: the smallest stay the smallest."""
    sizes = [int(size) for size in layers.split("+")]
    return [1 if size == min(sizes) else 2 for size in sizes]


def _experts(experts: Experts, width: int, tp: int, ep: int) -> Experts:
    count = _multiple(max(4, experts.num_experts_per_tok + 2), ep)
    return experts.model_copy(
        update={
            "num_experts": min(experts.num_experts, count),
            "moe_intermediate_size": _same_remainder(experts.moe_intermediate_size, width, tp),
            "num_shared_experts": min(experts.num_shared_experts, 2),
            "first_k_dense_replace": min(experts.first_k_dense_replace, 1),
            "decoder_sparse_step": min(experts.decoder_sparse_step, 2),
        }
    )


def _fitted(strategy: Strategy, full: ModelSpec, small: ModelSpec) -> Strategy:
    """The strategy with what it says of layers and sizes brought down to the small shape."""
    layers = small.num_hidden_layers
    changes: dict[str, Any] = {}
    if strategy.pp > 1 and strategy.layers not in ("even", "balanced"):
        *sizes, last = _small_stages(strategy.layers)
        changes["layers"] = "+".join(map(str, [*sizes, last + layers - sum(sizes) - last]))
    if strategy.wrap == "auto" and strategy.zero >= 2 and count_parameters(full).total >= SMALL_UNIT:
        # The small model would be one unit, where the full one has many.
        changes["wrap"] = "block"
    kind, _, number = strategy.recompute.partition(":")
    if kind == "first":
        part = max(1, int(number) * layers // full.num_hidden_layers)
        changes["recompute"] = f"first:{part}"
    kind, _, argument = strategy.wrap.partition(":")
    if kind == "size":
        share = count_parameters(small).total / count_parameters(full).total
        changes["wrap"] = f"size:{max(1, int(int(argument) * share))}"
    if kind == "name":
        changes["wrap"] = "name:" + re.sub(r"\b\d+\b", lambda index: str(int(index[0]) % layers), argument)
    return replace(strategy, **changes)


def _same_remainder(size: int, about: int, pieces: int) -> int:
    """A size near `about`, or the size itself if that is smaller, which leaves the same remainder when it is cut."""
    # With at least as many rows in a part as there are parts, no part is empty.
    return min(size, _multiple(max(about, pieces * pieces), pieces) + size % pieces)


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit
