"""Whether a model can be trained under a strategy: what it must have for each axis, and what would do instead.

Refusals name the setting and the nearest legal values. `Strategy.check` asks here; nothing else needs to.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from meshwright.context_layout import ContextLayout
from meshwright.cuts import part_length
from meshwright.errors import ConfigError
from meshwright.models.shapes import shapes_of
from meshwright.schedules import splits_backward, stages_per_rank
from meshwright.stages import cut_layers

if TYPE_CHECKING:
    from meshwright.models.spec import ModelSpec
    from meshwright.strategy import Strategy


def check_fit(strategy: Strategy, model: ModelSpec, sequence_length: int | None) -> None:
    """Raise a ConfigError unless the model can be split so."""
    _check_tensor(strategy, model, sequence_length)
    _check_experts(strategy, model)
    _check_context(strategy, model, sequence_length)
    _check_wrap(strategy, model)
    check_stages(strategy, model.num_hidden_layers)
    kind, _, count = strategy.recompute.partition(":")
    if kind == "first" and int(count) > model.num_hidden_layers:
        layers = model.num_hidden_layers
        raise refuse(str(strategy), f"recompute=first:{count} of {layers} layers; use first:{layers} or full")


def check_stages(strategy: Strategy, layers: int) -> None:
    """Every stage has layers; what is gathered must be there when a split backward pass comes back for it."""
    if strategy.pp == 1:
        return
    stages = strategy.pp * stages_per_rank(strategy.schedule)
    if stages > layers:
        legal = [pp for pp in range(1, layers + 1) if pp * stages_per_rank(strategy.schedule) <= layers]
        raise refuse(
            str(strategy),
            f"pp={strategy.pp} with schedule={strategy.schedule} has {stages} stages and the model {layers} layers; "
            f"pp can be at most {legal[-1] if legal else 1}{_fewer_rounds(strategy, layers)}",
        )
    try:
        cut_layers(layers, stages, strategy.layers, lambda: [1.0] * layers)
    except ValueError as error:
        raise refuse(str(strategy), f"layers={error}; give {stages} numbers that add up to {layers}") from None
    if strategy.zero == 3 and strategy.dp * strategy.cp > 1 and splits_backward(strategy.schedule):
        raise refuse(
            str(strategy),
            f"schedule={strategy.schedule} computes gradients of weights late, when zero=3 has put the weights away; "
            "use zero=2, or schedule=1f1b",
        )


def _fewer_rounds(strategy: Strategy, layers: int) -> str:
    rounds = layers // strategy.pp
    return f", or schedule=interleaved:{rounds}" if strategy.schedule.startswith("interleaved") and rounds else ""


def _check_wrap(strategy: Strategy, model: ModelSpec) -> None:
    """Names must be those of the decoder's modules."""
    kind, _, names = strategy.wrap.partition(":")
    if kind != "name":
        return
    parts = {part for name in shapes_of(model) for part in name.split(".")[:-1] if not part.isdecimal()}
    known = sorted(parts | {"lm_head"})
    for name in names.split("+"):
        if name.split(".")[-1] not in known and not name.split(".")[-1].isdecimal():
            raise refuse(str(strategy), f"the model has no module '{name}'; it has {', '.join(known)}")


def _check_experts(strategy: Strategy, model: ModelSpec) -> None:
    """Experts are dealt out whole and evenly; a capacity counts the tokens of whole sequences."""
    experts = model.experts
    if strategy.ep > 1 and not any(map(model.is_sparse, range(model.num_hidden_layers))):
        raise refuse(str(strategy), f"ep={strategy.ep} splits experts, and the model has none; leave ep out")
    if experts is not None and experts.num_experts % strategy.ep:
        count = experts.num_experts
        legal = [ep for ep in strategy.expert_degrees if count % ep == 0]
        raise refuse(
            str(strategy), f"ep={strategy.ep} does not divide the model's {count} experts; ep can be {listed(legal)}"
        )
    if experts is not None and experts.capacity_factor is not None and strategy.cp > 1:
        raise refuse(
            str(strategy),
            f"cp={strategy.cp} splits sequences, and experts.capacity_factor={experts.capacity_factor:g} counts the "
            "tokens of whole ones; leave one of them out",
        )


def _check_tensor(strategy: Strategy, model: ModelSpec, sequence_length: int | None) -> None:
    """Heads are dealt out whole; key-value heads may be held by several ranks; tokens are dealt out evenly."""
    if strategy.tp == 1:
        return
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    legal = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if strategy.tp not in legal:
        raise refuse(
            str(strategy),
            f"tp={strategy.tp} cannot deal out {heads} attention heads and {kv_heads} key-value heads; "
            f"tp can be {listed(legal)}",
        )
    sizes = {"vocab_size": model.vocab_size, "intermediate_size": model.intermediate_size}
    if model.experts is not None:
        sizes["experts.moe_intermediate_size"] = model.experts.moe_intermediate_size
    for name, size in sizes.items():
        # Every rank needs something to hold: FSDP cannot take nothing.
        if not _fills(size, strategy.tp):
            legal = [n for n in legal if _fills(size, n)]
            reason = f"tp={strategy.tp} leaves a rank without a part of the model's {name}={size}"
            raise refuse(str(strategy), f"{reason}; tp can be {listed(legal)}")
    if strategy.cp == 1 and strategy.sp and sequence_length is not None and sequence_length % strategy.tp:
        below = sequence_length // strategy.tp * strategy.tp
        legal_lengths = f"{below} or {below + strategy.tp}" if below else str(strategy.tp)
        raise refuse(
            str(strategy),
            f"data.sequence_length={sequence_length} is not divisible by tp={strategy.tp}; "
            f"use {legal_lengths}, or sp=off",
        )


def _check_context(strategy: Strategy, model: ModelSpec, sequence_length: int | None) -> None:
    """Heads are dealt out whole, key-value heads to several ranks if need be; every rank needs tokens."""
    if strategy.cp == 1:
        return
    layout = ContextLayout.of(strategy.cp, strategy.cp_method)
    heads, kv_heads = model.num_attention_heads // strategy.tp, max(1, model.num_key_value_heads // strategy.tp)
    legal = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if layout.heads not in legal:
        within = " of a tp rank" if strategy.tp > 1 else ""
        fitting = [n for n in legal if n > 1 and strategy.cp % n == 0]
        others = f", or ulysses:N with N of {listed(fitting)}" if fitting else ""
        raise refuse(
            str(strategy),
            f"cp_method={strategy.cp_method} cannot deal out {heads} attention heads and {kv_heads} key-value heads"
            f"{within} to {layout.heads} ranks; use cp_method=ring{others}",
        )
    multiple = strategy.tp if strategy.sp else 1
    if sequence_length is not None and not layout.fits(sequence_length, multiple):
        reason = f"leaves one of cp={strategy.cp} ranks without tokens"
        if layout.fits(sequence_length):
            reason = f"gives cp={strategy.cp} ranks parts that are not divisible by tp={strategy.tp}"
        legal_lengths = " or ".join(map(str, layout.nearest_lengths(sequence_length, multiple)))
        others = ", or sp=off" if strategy.sp else ""
        raise refuse(str(strategy), f"data.sequence_length={sequence_length} {reason}; use {legal_lengths}{others}")


def _fills(length: int, parts: int) -> bool:
    """Whether no part of that length is empty."""
    return part_length(length, parts, parts - 1) > 0


def divisors(number: int) -> list[int]:
    below = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*below, *(number // n for n in below)})


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def refuse(text: str, reason: str) -> ConfigError:
    return ConfigError(f"parallel.strategy='{text}': {reason}")
