"""How tensor parallel splits the decoder: one table, module -> rule; no torch.

`parallel/tensor.py` says what the rules mean and applies them; the estimates count by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from meshwright.models.spec import ModelSpec

TENSOR_PLAN = {
    "model.embed_tokens": "vocabulary",
    "model.embed_positions": "lookup",
    "model.embedding_dropout": "dropout",
    "model.layers.*.input_layernorm": "tokens",
    "model.layers.*.self_attn": "region",
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.k_proj": "heads:{spec.num_key_value_heads}",
    "model.layers.*.self_attn.v_proj": "heads:{spec.num_key_value_heads}",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.self_attn.?_norm": "shared",
    "model.layers.*.attention_dropout": "dropout",
    "model.layers.*.post_attention_layernorm": "tokens",
    "model.layers.*.mlp": "region",
    "model.layers.*.mlp.gate": "shared",
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*.mlp*.gate_proj": "column",
    "model.layers.*.mlp*.up_proj": "column",
    "model.layers.*.mlp*.down_proj": "row",
    "model.layers.*.mlp_dropout": "dropout",
    "model.norm": "tokens",
    "lm_head": "head",
}
"""A `*` stands for any layer; a number behind a colon is the rule's own."""


class Rule(NamedTuple):
    """A word of the table and the number behind it."""

    word: str
    number: int = 0


def tensor_plan(spec: ModelSpec) -> dict[str, str]:
    """The table for one shape."""
    return {module: rule.format(spec=spec) for module, rule in TENSOR_PLAN.items()}


def entry_of(plan: Mapping[str, str], name: str) -> str | None:
    """What a table of patterns says of a name: that of the first which it fits."""
    return next((entry for pattern, entry in plan.items() if fnmatchcase(name, pattern)), None)


def rule_of(plan: Mapping[str, str], module: str) -> Rule | None:
    """The table's rule for a module, by its name."""
    entry = entry_of(plan, module)
    if entry is None:
        return None
    word, _, number = entry.partition(":")
    return Rule(word, int(number or 0))


def cut_dimension(rule: Rule, parameter: str, tp: int) -> int | None:
    """Which dimension of a module's parameter tensor parallel cuts; None where every rank holds all of it."""
    match rule.word:
        case "column" | "vocabulary" | "head" | "outputs" | "outputs-whole":
            return 0
        case "heads":
            return 0 if rule.number % tp == 0 else None
        case "row" | "inputs" | "inputs-own":
            return 1 if parameter == "weight" else None
        case "experts":
            return 2 if parameter == "down_proj" else 1
        case _:
            return None
