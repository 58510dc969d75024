"""The model of a published training run: the shape that its row gives, or that a model of its name is known to have."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from published_words import Skip, number_of

HERE = Path(__file__).parent
GPT_VOCABULARY = 51200
"""Of Megatron's GPT models: GPT-2's tokens, padded."""


@cache
def _shapes() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "data/model_shapes.toml").read_text(encoding="utf-8"))


def _known(model: str) -> dict[str, Any]:
    names = [name for name in _shapes() if model.lower().startswith(name)]
    return dict(_shapes()[max(names, key=len)]) if names else {}


def spec_of(row: dict[str, str], assumed: list[str]) -> ModelSpec:
    """The model's shape; gated or not, tied or not, as the number of parameters says."""
    known = _known(row.get("model", ""))

    def size(column: str, name: str) -> int:
        value = number_of(row.get(column, ""))
        if value is None and name in known:
            assumed.append(f"{column}={known[name]}")
            return int(known[name])
        if value is None:
            raise Skip(f"{column} is not given")
        return int(value)

    width = size("hidden", "hidden_size")
    if not row.get("n_heads") and "num_attention_heads" not in known and width % 128 == 0:
        known["num_attention_heads"] = width // 128
    if not row.get("vocab") and "vocab_size" not in known and row.get("model", "").lower().startswith("gpt"):
        known["vocab_size"] = GPT_VOCABULARY
    if not row.get("n_layers") and "num_hidden_layers" not in known:
        known |= _layers(row, width, known)
    heads = size("n_heads", "num_attention_heads")
    experts = None
    count = number_of(row.get("moe_experts", ""))
    inner = number_of(row.get("ffn_hidden", ""))
    if count is not None:
        per_token = number_of(row.get("moe_topk", ""))
        if per_token is None:
            raise Skip("moe_topk is not given")
        facts = dict(known.get("experts", {}))
        if inner is not None:
            facts.setdefault("moe_intermediate_size", int(inner))
        if "moe_intermediate_size" not in facts:
            raise Skip("ffn_hidden is not given")
        experts = {"num_experts": int(count), "num_experts_per_tok": int(per_token), **facts}
        inner = known.get("intermediate_size", facts["moe_intermediate_size"])
    else:
        inner = size("ffn_hidden", "intermediate_size")
    latent = known.get("latent_attention")
    if width % heads and "head_dim" not in known and latent is None:
        raise Skip(f"hidden={width} is not divisible by n_heads={heads}")
    groups = number_of(row.get("n_kv_heads", "")) or heads
    base: dict[str, Any] = {
        "vocab_size": size("vocab", "vocab_size"),
        "hidden_size": width,
        "intermediate_size": int(inner or 0),
        "num_hidden_layers": size("n_layers", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(groups) if latent is None else heads,
        "head_dim": known.get("head_dim", width // heads),
        "max_position_embeddings": 1 << 20,
        "positions": "rope",
        "qk_norm": known.get("qk_norm", False),
        "experts": experts,
        "latent_attention": latent,
    }
    kinds = [known["activation"]] if "activation" in known else ["swiglu", "gelu"]
    ties = [known["tie_word_embeddings"]] if "tie_word_embeddings" in known else [False, True]
    try:
        specs = [
            ModelSpec.model_validate({**base, "activation": kind, "tie_word_embeddings": tied})
            for kind in kinds
            for tied in ties
        ]
    except ValidationError as error:
        raise Skip(f"impossible shape: {error.errors()[0]['msg']}") from None
    total = number_of(row.get("params_b", ""))
    if total is None or len(specs) == 1:
        return specs[0]
    return min(specs, key=lambda spec: abs(count_parameters(spec).total / 1e9 - total))


def _layers(row: dict[str, str], width: int, known: dict[str, Any]) -> dict[str, int]:
    """How many layers a dense model of that size and width has."""
    total, inner = number_of(row.get("params_b", "")), number_of(row.get("ffn_hidden", ""))
    if total is None or inner is None or row.get("moe_experts"):
        return {}
    matrices = 3 if known.get("activation") == "swiglu" else 2
    table = width * (number_of(row.get("vocab", "")) or 0)
    return {"num_hidden_layers": round((total * 1e9 - table) / (4 * width**2 + matrices * width * inner))}
