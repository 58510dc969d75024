"""config.json and spec: defaults as in transformers, both forms of its rope fields, and nothing ignored."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.models.hf_config import config_from_spec, spec_from_config
from meshwright.models.hf_features import config_notes, hf_families
from meshwright.models.presets import preset, presets
from meshwright.models.spec import ModelSpec, RopeScaling

FAMILIES = list(hf_families())
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name: str) -> None:
    assert spec_from_config(PUBLISHED[name], name) == preset(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_mean_what_they_mean_in_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    assert spec_from_config({"model_type": family}, "empty") == spec_from_config(theirs, "written out")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_that_transformers_writes_is_unknown(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    notes = config_notes(transformers.AutoConfig.for_model(family).to_dict(), "config.json")
    assert not [note for note in notes if "not known" in note]


@pytest.mark.parametrize("name", [name for name, each in presets().items() if each.spec.family in FAMILIES])
def test_a_preset_comes_back_from_its_config(name: str) -> None:
    assert spec_from_config(config_from_spec(preset(name)), name) == preset(name)


def llama(**fields: Any) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, **fields}


ROPE_FORMS = {
    "transformers 4": {"rope_theta": 7e5, "rope_scaling": LLAMA3},
    "transformers 4, old name of the type": {
        "rope_theta": 7e5,
        "rope_scaling": {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"},
    },
    "transformers 5": {"rope_parameters": {**LLAMA3, "rope_theta": 7e5}},
    "by layer type": {
        "layer_types": ["full_attention"] * 32,
        "rope_parameters": {"full_attention": {**LLAMA3, "rope_theta": 7e5}},
    },
    "original length beside": {
        "rope_theta": 7e5,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1},
        "original_max_position_embeddings": 8192,
    },
    "original length from the context": {
        "rope_theta": 7e5,
        "max_position_embeddings": 8192,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    },
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_every_form_of_the_rope_fields_is_understood(form: str) -> None:
    spec = spec_from_config(llama(**ROPE_FORMS[form]), form)
    assert spec.rope_theta == 7e5
    assert spec.rope_scaling == RopeScaling(kind="llama3", factor=8.0)


QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9}


def test_windows_on_all_layers_or_on_none_are_understood() -> None:
    assert spec_from_config({**QWEN2, "max_window_layers": 0}, "c").sliding_window == 9
    assert spec_from_config({**QWEN2, "max_window_layers": 4}, "c").sliding_window is None
    assert spec_from_config({**QWEN2, "use_sliding_window": False}, "c").sliding_window is None
    assert spec_from_config({**QWEN2, "layer_types": ["sliding_attention"] * 4}, "c").sliding_window == 9
    assert spec_from_config({"model_type": "mistral"}, "c").sliding_window == 4096
    assert spec_from_config({"model_type": "mistral", "sliding_window": None}, "c").sliding_window is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model type": ({"model_type": "lama"}, r"model_type 'lama' is not supported \(did you mean 'llama'\?\)"),
    "no model type": ({}, "no model_type; supported: llama, "),
    "another head": (llama(architectures=["LlamaForSequenceClassification"]), "only LlamaForCausalLM is"),
    "yarn": (
        llama(rope_scaling={"type": "yarn", "factor": 4.0}),
        r"rope_scaling of type 'yarn' .* default, linear, llama3",
    ),
    "dynamic, new form": (
        llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters of type 'dyn",
    ),
    "half of llama3": (
        llama(rope_scaling={"type": "llama3", "factor": 2.0}),
        "lacks low_freq_factor, high_freq_factor",
    ),
    "sections": (llama(rope_scaling={"type": "default", "mrope_section": [1]}), "rope_scaling has mrope_section"),
    "partial rotation": (llama(rope_parameters={"partial_rotary_factor": 0.5}), "has partial_rotary_factor"),
    "partial rotation, old form": (llama(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
    "rope by layer": (
        {**QWEN2, "rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
        "rope_parameters differs between layer types",
    ),
    "windows on some layers": ({**QWEN2, "max_window_layers": 2}, "max_window_layers=2 puts a sliding window on some"),
    "windows by layer types": (
        {**QWEN2, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types puts a sliding window on some",
    ),
    "a window against the layer types": (
        {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 32},
        "layer_types puts",
    ),
    "a window in llama": (llama(sliding_window=8), "sliding_window=8 is not supported: .* mistral has one"),
    "another activation": (llama(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported: silu"),
    "another activation in gpt2": (
        {"model_type": "gpt2", "activation_function": "relu"},
        "activation_function 'relu' is not supported; supported: gelu, gelu_new",
    ),
    "quantised": (llama(quantization_config={"bits": 4}), "quantization_config is not supported: quantised weights"),
    "capped logits": (llama(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "sinks": (llama(attention_sinks=True), "attention_sinks"),
    "biases that qwen2 does not have": ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True"),
    "biases that mistral does not have": ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias=True"),
    "experts in llama": (llama(num_local_experts=8), "num_local_experts=8"),
    "dense layers in the middle": ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
    "scores by layer": ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
    "scores without scale": ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights=False"),
    "cross attention": ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
    "attention to later tokens": (llama(is_causal=False), "is_causal=False"),
    "two names, two values": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
        "num_local_experts=8 contradicts num_experts=4",
    ),
    "impossible shape": (llama(num_attention_heads=7), "hidden_size=64 is not divisible by num_attention_heads=7"),
    "no number": (llama(vocab_size=None), "vocab_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as caught:
        spec_from_config(config, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


def test_neutral_values_of_such_fields_are_fine() -> None:
    neutral = {"is_causal": True, "partial_rotary_factor": 1.0, "sliding_window": None, "quantization_config": None}
    assert spec_from_config(llama(**neutral, num_experts=0), "c") == spec_from_config(llama(), "c")


def test_what_is_left_out_is_said() -> None:
    assert config_notes({"model_type": "gpt2"}, "c") == [
        "c: attn_pdrop=0.1 is left out: attention weights are not dropped",
    ]
    notes = "\n".join(
        config_notes(
            llama(attention_dropout=0.2, auto_map={"AutoModel": "x.Y"}, novelty=3, nothing=None, unused=False), "c"
        )
    )
    assert "attention_dropout=0.2 is left out" in notes
    assert "auto_map" in notes
    assert "not known and not used: novelty" in notes
    assert "nothing" not in notes
    assert "unused" not in notes
    jitter = {"model_type": "mixtral", "router_jitter_noise": 0.1}
    assert "router_jitter_noise=0.1 is left out" in config_notes(jitter, "c")[0]
    rates = {"model_type": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.3}
    assert "embd_pdrop=0.3 is left out: the one dropout rate is resid_pdrop=0.1" in config_notes(rates, "c")[0]


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNSAYABLE: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "llama config.json cannot say dropout=0.1; .* with dropout=0.0 in the spec"),
    "window": ({"sliding_window": 8}, "cannot say sliding_window=8; a family that can: mistral"),
    "norms of queries": ({"qk_norm": True}, "cannot say qk_norm=True; a family that can: qwen3"),
    "layer norm": ({"norm": "layernorm"}, "cannot say norm=layernorm; no supported family can"),
    "biases of qwen2": ({"bias": ("q", "k", "v")}, r"cannot say bias=q\+k\+v; a family that can: qwen2"),
    "experts": ({"experts": EXPERTS}, "cannot say experts=set; a family that can: mixtral"),
    "shared experts": (
        {"family": "mixtral", "experts": {**EXPERTS, "num_shared_experts": 1}},
        "a mixtral config.json cannot say experts.num_shared_experts=1; no supported family can",
    ),
    "weights not rescaled": (
        {"family": "mixtral", "experts": {**EXPERTS, "norm_topk_prob": False}},
        "cannot say experts.norm_topk_prob=False; no supported",
    ),
    "no experts in mixtral": ({"family": "mixtral"}, "cannot say experts=none; a family that can: llama"),
    "grouped queries in gpt2": (
        {"family": "gpt2", "norm": "layernorm", "positions": "learned", "activation": "gelu"},
        "cannot say num_key_value_heads=2",
    ),
    "heads that do not divide": (
        {"hidden_size": 66, "head_dim": 16},
        "does not divide hidden_size; a family that can: mistral",
    ),
    "DeepSeek": ({"family": "deepseek_v3"}, "family 'deepseek_v3' has no Hugging Face form here"),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_a_spec_that_its_family_cannot_say_is_refused_with_one_that_can(name: str) -> None:
    fields, message = UNSAYABLE[name]
    spec = preset("tiny").model_dump() | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | fields
    with pytest.raises(UserError, match=message):
        config_from_spec(ModelSpec.model_validate(spec))


def test_settings_of_training_and_unused_widths_are_no_reason_to_refuse() -> None:
    experts = {**EXPERTS, "router_bias_update_rate": 0.001, "router_aux_loss_coef": 0.02}
    spec = ModelSpec.model_validate(preset("tiny").model_dump() | {"family": "mixtral", "experts": experts})
    assert config_from_spec(spec)["intermediate_size"] == 32
    assert config_from_spec(spec)["router_aux_loss_coef"] == 0.02
