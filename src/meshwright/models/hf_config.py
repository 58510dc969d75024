"""A Hugging Face config.json as a ModelSpec, and back.

A field either has a place in the spec, or is known to change no logits, or stops the reading with its name. Writing is
checked by reading back: a spec that its family cannot express is refused, never trimmed. Nothing here imports torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import CheckpointError, UserError
from meshwright.models.hf_features import config_notes, family_of, hf_families, refuse_features, with_defaults
from meshwright.models.spec import Linear, ModelSpec

_ATTENTION_BIAS: tuple[Linear, ...] = ("q", "k", "v", "o")
_FEED_FORWARD_BIAS: tuple[Linear, ...] = ("gate", "up", "down")
_GPT2_BIAS: tuple[Linear, ...] = (*_ATTENTION_BIAS, "up", "down")
_QK_NORM = ("qwen3", "qwen3_moe")
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_spec(folder: Path | str) -> ModelSpec:
    """The spec of the model in a Hugging Face folder; what is left out of it is said in warnings."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    spec = spec_from_config(config, str(path))
    for note in config_notes(config, str(path)):
        warnings.warn(note, stacklevel=2)
    return spec


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a Hugging Face folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there; a Hugging Face folder has one") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a config.json; what the decoder does not compute is a UserError that names the field."""
    family = family_of(config, where)
    refuse_features(config, family, where)
    values = with_defaults(config, family, where)
    fields = _gpt2_fields(values, where) if family.name == "gpt2" else _rope_family_fields(family.name, values, where)
    try:
        return ModelSpec.model_validate({"family": family.name, **fields})
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'shape'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{where}: {reasons}") from error


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A config.json without dtype and token ids; a spec that its family cannot express is a UserError."""
    families = hf_families()
    if spec.family not in families:
        raise UserError(
            f"family '{spec.family}' has no Hugging Face form here; families that have: {', '.join(families)}"
        )
    lost = _lost(spec)
    if not lost:
        return _config(spec)
    others = {other: ModelSpec.model_validate(spec.model_dump() | {"family": other}) for other in families}
    fitting = ", ".join(other for other, same in others.items() if not _lost(same))
    advice = f"a family that can: {fitting}" if fitting else "no supported family can"
    if spec.dropout and spec.family != "gpt2":
        advice += "; dropout acts in training only: with dropout=0.0 in the spec the exported model computes the same"
    raise UserError(f"a {spec.family} config.json cannot say {', '.join(lost)}; {advice}")


def _gpt2_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    if values["activation_function"] not in _GELU:
        supported = ", ".join(_GELU)
        raise UserError(
            f"{where}: activation_function '{values['activation_function']}' is not supported; supported: {supported}"
        )
    inner = values.get("n_inner")
    return {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["n_embd"],
        "intermediate_size": 4 * values["n_embd"] if inner is None else inner,
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": values["n_head"],
        "max_position_embeddings": values["n_positions"],
        "norm": "layernorm",
        "norm_eps": values["layer_norm_epsilon"],
        "positions": "learned",
        "activation": _GELU[values["activation_function"]],
        "bias": _GPT2_BIAS,
        "dropout": values["resid_pdrop"],
        "tie_word_embeddings": values["tie_word_embeddings"],
        "initializer_range": values["initializer_range"],
    }


_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
"""Fields that config.json and the spec call the same."""


def _rope_family_fields(family: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    if values["hidden_act"] not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act '{values['hidden_act']}' is not supported; supported: silu")
    bias: tuple[Linear, ...] = ("q", "k", "v") if family == "qwen2" else ()
    bias = _ATTENTION_BIAS if values.get("attention_bias") and family != "qwen2" else bias
    bias += _FEED_FORWARD_BIAS if values.get("mlp_bias") else ()
    theta, scaling = _rope(values, where)
    return {
        **{field: values.get(field) for field in _SHARED},
        "norm_eps": values["rms_norm_eps"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "bias": bias,
        "qk_norm": family in _QK_NORM,
        "sliding_window": _window(family, values, where),
        "experts": _experts(family, values, where),
    }


def _rope(values: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (4)."""
    source = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = values.get(source) or {}
    if any(isinstance(value, dict) for value in given.values()):
        by_layer = [given.get(kind) for kind in values.get("layer_types") or given]
        if any(each != by_layer[0] for each in by_layer) or not by_layer[0]:
            raise UserError(f"{where}: {source} differs between layer types; one for all layers is supported")
        given = by_layer[0]
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"{where}: {source} of type '{kind}' is not supported; supported: default, linear, llama3")
    known = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", *_ROPE_FIELDS}
    strange = sorted(field for field, value in given.items() if field not in known and value is not None)
    if given.get("partial_rotary_factor", 1) not in (None, 1):
        strange.append("partial_rotary_factor")
    if strange:
        raise UserError(f"{where}: {source} has {', '.join(strange)}, which is not supported")
    theta = given.get("rope_theta", values["rope_theta"])
    if kind == "default":
        return theta, None
    original = values.get("original_max_position_embeddings")
    given = {_ROPE_FIELDS[2]: values["max_position_embeddings"], **given}
    if original is not None:
        given[_ROPE_FIELDS[2]] = original
    needed = ("factor",) if kind == "linear" else ("factor", *_ROPE_FIELDS)
    if missing := [field for field in needed if given.get(field) is None]:
        raise UserError(f"{where}: {source} of type '{kind}' lacks {', '.join(missing)}")
    return theta, {"kind": kind, **{field: given[field] for field in needed}}


def _window(family: str, values: Mapping[str, Any], where: str) -> int | None:
    window = values.get("sliding_window")
    if not values.get("use_sliding_window", True):
        window = None
    layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    by_layer = family in ("qwen2", "qwen3")
    if kinds is None and by_layer and window is not None:
        full = min(max(values["max_window_layers"], 0), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if kinds is None or (set(kinds) == {"sliding_attention"} and window is not None):
        return window
    if set(kinds) == {"full_attention"} and (window is None or by_layer):
        return None
    field = "layer_types" if values.get("layer_types") else f"max_window_layers={values['max_window_layers']}"
    raise UserError(f"{where}: {field} puts a sliding window on some layers only; on all or on none is supported")


def _experts(family: str, values: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    if family == "mixtral":
        return {
            "num_experts": values["num_local_experts"],
            "num_experts_per_tok": values["num_experts_per_tok"],
            "moe_intermediate_size": values["intermediate_size"],
            "router_aux_loss_coef": values["router_aux_loss_coef"],
        }
    if family != "qwen3_moe":
        return None
    dense = sorted(values.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise UserError(f"{where}: mlp_only_layers={dense} is not supported; only the first layers can be dense")
    fields = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    return {
        **{field: values[field] for field in (*fields, "router_aux_loss_coef")},
        "first_k_dense_replace": len(dense),
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    """What the spec's family can say of it; whether that is all is for `_lost` to find out."""
    family = hf_families()[spec.family]
    gelu = {ours: theirs for theirs, ours in reversed(_GELU.items())}
    every = {
        **spec.model_dump(include=set(_SHARED)),
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        # The form of transformers 4, which 5 reads as well.
        "rope_scaling": _rope_scaling(spec),
        "attention_bias": "o" in spec.bias,
        "attention_dropout": 0.0,
        "mlp_bias": "gate" in spec.bias,
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": spec.num_hidden_layers if spec.sliding_window is None else 0,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_attention_heads,
        "n_inner": spec.intermediate_size,
        "n_layer": spec.num_hidden_layers,
        "n_positions": spec.max_position_embeddings,
        "activation_function": gelu.get(spec.activation, "gelu_new"),
        "attn_pdrop": 0.0,
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "layer_norm_epsilon": spec.norm_eps,
    }
    if (experts := spec.experts) is not None:
        every |= experts.model_dump() | {"num_local_experts": experts.num_experts, "router_jitter_noise": 0.0}
        every["mlp_only_layers"] = list(range(experts.first_k_dense_replace))
        if spec.family == "mixtral":
            every["intermediate_size"] = experts.moe_intermediate_size
    config = {"architectures": [family.architecture], "model_type": family.name}
    return config | {field: every[field] for field in sorted(family.fields - {*family.aliases}) if field in every}


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    if spec.rope_scaling is None:
        return None
    scaling = spec.rope_scaling.model_dump()
    kind = scaling.pop("kind")
    return {"rope_type": kind, **({"factor": scaling["factor"]} if kind == "linear" else scaling)}


def _lost(spec: ModelSpec) -> list[str]:
    """The facts that would not come back from the spec's own config.json, as `name=value`."""
    try:
        back = spec_from_config(_config(spec), "read back").model_dump()
    except UserError as error:
        return [f"this shape ({error})"]
    lost: list[str] = []
    for name, value in spec.model_dump(exclude=_without_effect(spec)).items():
        other = set(back[name]) if name == "bias" else back[name]
        if isinstance(value, dict) and isinstance(other, dict):
            lost += [f"{name}.{inner}={each}" for inner, each in value.items() if other[inner] != each]
        elif (set(value) if name == "bias" else value) != other:
            shown = "+".join(value) if name == "bias" else "set" if isinstance(value, dict) else value
            lost.append(f"{name}={'none' if shown in (None, '') else shown}")
    if spec.family == "llama" and spec.hidden_size % spec.num_attention_heads:
        lost.append(f"num_attention_heads={spec.num_attention_heads}, which does not divide hidden_size")
    return lost


def _without_effect(spec: ModelSpec) -> dict[str, Any]:
    """Fields that change nothing that an exported model computes, as pydantic's `exclude`."""
    unused: dict[str, Any] = {"family": True, "experts": {"router_bias_update_rate"}}
    if all(spec.is_sparse(layer) for layer in range(spec.num_hidden_layers)):
        unused["intermediate_size"] = True
    if spec.positions == "learned":
        unused |= {"rope_theta": True, "rope_scaling": True}
    elif spec.rope_scaling is not None and spec.rope_scaling.kind == "linear":
        unused["rope_scaling"] = {*_ROPE_FIELDS}
    return unused
