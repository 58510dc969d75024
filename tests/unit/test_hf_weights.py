"""Our decoder and transformers' models compute the same logits from the same files, in both directions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder
from meshwright.models.hf import load_hf, save_hf
from meshwright.models.initialize import build
from meshwright.models.spec import ModelSpec, RopeScaling

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY, TOKENS = 61, 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "attn_pdrop": 0.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THEIR_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama tied, biases, own head size": {
        "model_type": "llama",
        **SIZES,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 10,
    },
    "llama with llama3 rope": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3_ROPE},
    "llama with linear rope": {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.5},
    },
    "mistral with window": {"model_type": "mistral", **SIZES, "sliding_window": 7},
    "mistral without window": {"model_type": "mistral", **SIZES, "sliding_window": None, "head_dim": 12},
    "qwen2 tied": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen2 with window": {
        "model_type": "qwen2",
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 10, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "gpt2": {"model_type": "gpt2", **GPT2_SIZES},
    "gpt2 untied": {
        "model_type": "gpt2",
        **GPT2_SIZES,
        "n_inner": 72,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Nothing in this file should need a note."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="meshwright")
        yield


def scramble(model: torch.nn.Module) -> None:
    """Weights large enough that a mix-up of any two shows in the logits; biases and norms move too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(1 + noise if "norm" in name or ".ln_" in name else noise)


def their_model(config: dict[str, Any]) -> Any:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], bos_token_id=None, eos_token_id=None, **fields)
    model = transformers.AutoModelForCausalLM.from_config(made)
    scramble(model)
    return model.eval()


def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours: Decoder, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs(input_ids=batch(), use_cache=False).logits
        torch.testing.assert_close(ours.eval()(batch()), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1  # logits near zero would agree by being small


@pytest.mark.parametrize("name", THEIR_CONFIGS)
def test_a_folder_of_transformers_gives_the_same_logits_here(name: str, tmp_path: Path) -> None:
    theirs = their_model(THEIR_CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_hf(tmp_path), theirs)


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SHAPE = {
    **SHAPE,
    "family": "gpt2",
    "num_key_value_heads": 6,
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu_tanh",
    "bias": ("q", "k", "v", "o", "up", "down"),
}
OUR_SPECS: dict[str, ModelSpec] = {
    "llama": ModelSpec(**SHAPE),
    "llama tied, biases, own head size": ModelSpec(
        **SHAPE, tie_word_embeddings=True, bias=("q", "k", "v", "o", "gate", "up", "down"), head_dim=10
    ),
    "llama with llama3 rope": ModelSpec(
        **SHAPE,
        rope_theta=5000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=8, original_max_position_embeddings=32),
    ),
    "llama with linear rope": ModelSpec(**SHAPE, rope_scaling=RopeScaling(kind="linear", factor=2.5)),
    "mistral with window": ModelSpec(**SHAPE, family="mistral", sliding_window=7),
    "mistral with odd width": ModelSpec(**SHAPE | {"hidden_size": 50}, family="mistral", head_dim=10),
    "qwen2 tied": ModelSpec(**SHAPE, family="qwen2", bias=("q", "k", "v"), tie_word_embeddings=True),
    "qwen2 with window": ModelSpec(**SHAPE, family="qwen2", bias=("q", "k", "v"), sliding_window=5),
    "qwen3": ModelSpec(**SHAPE, family="qwen3", qk_norm=True, head_dim=10, bias=("q", "k", "v", "o")),
    "mixtral": ModelSpec(
        **SHAPE | {"intermediate_size": 20},
        family="mixtral",
        experts={"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "qwen3_moe": ModelSpec(
        **SHAPE,
        family="qwen3_moe",
        qk_norm=True,
        sliding_window=9,
        experts={
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt2": ModelSpec(**GPT2_SHAPE, tie_word_embeddings=True, dropout=0.2),
    "gpt2 untied": ModelSpec(**GPT2_SHAPE | {"activation": "gelu", "intermediate_size": 72}),
}


def our_model(name: str) -> Decoder:
    model = build(OUR_SPECS[name], seed=3)
    scramble(model)
    return model


@pytest.mark.parametrize("name", OUR_SPECS)
def test_our_folder_gives_the_same_logits_in_transformers_and_comes_back_bitwise(name: str, tmp_path: Path) -> None:
    ours = our_model(name)
    save_hf(ours, tmp_path / "out", max_shard_bytes=40_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(ours, theirs.eval())

    back = load_hf(tmp_path / "out")
    assert back.spec == ours.spec
    assert {key: value.shape for key, value in back.state_dict().items()} == {
        key: value.shape for key, value in ours.state_dict().items()
    }
    for key, value in ours.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


def test_shards_of_transformers_are_all_read(tmp_path: Path) -> None:
    theirs = their_model(THEIR_CONFIGS["mixtral"])
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(load_hf(tmp_path), theirs)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_transformers_wrote_stacked_are_read(name: str, tmp_path: Path) -> None:
    theirs = their_model(THEIR_CONFIGS[name])
    theirs.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert any(key.endswith("experts.gate_up_proj") for key in file.keys())  # noqa: SIM118 (not a dict)
    assert_same_logits(load_hf(tmp_path), theirs)


def test_gpt2_files_without_prefix_and_with_old_buffers_are_read(tmp_path: Path) -> None:
    theirs = their_model(THEIR_CONFIGS["gpt2"])
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(load_hf(tmp_path), theirs)


@pytest.mark.parametrize("kept", ["both", "head only"])
def test_a_tied_head_that_is_in_the_files_does_no_harm(kept: str, tmp_path: Path) -> None:
    ours = our_model("qwen2 tied")
    save_hf(ours, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if kept == "head only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file)
    back = load_hf(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.equal(back.lm_head.weight, ours.lm_head.weight)


def test_a_tied_model_with_another_head_in_its_files_is_refused(tmp_path: Path) -> None:
    save_hf(our_model("qwen2 tied"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
        load_hf(tmp_path / "out")


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_hf(our_model("mixtral"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for expert in range(5):
        del tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
    tensors["model.norm.weight"] = torch.ones(47)
    tensors["model.layers.3.input_layernorm.weight"] = torch.ones(48)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path / "out")
    message = str(caught.value)
    assert "5 missing: model.layers.1.block_sparse_moe.experts.0.w2.weight [48, 20], " in message
    assert "and 1 more" in message
    assert "1 not expected: model.layers.3.input_layernorm.weight" in message
    assert "1 of another shape: model.norm.weight is [47] instead of [48]" in message


def test_the_dtype_is_that_of_the_files_unless_one_is_given(tmp_path: Path) -> None:
    ours = our_model("llama").to(torch.bfloat16)
    save_hf(ours, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_hf(tmp_path / "out").lm_head.weight.dtype == torch.bfloat16
    wide = load_hf(tmp_path / "out", dtype=torch.float64)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.lm_head.weight, ours.lm_head.weight.double())


def test_files_of_mixed_dtypes_are_converted_with_a_word(tmp_path: Path) -> None:
    save_hf(our_model("llama").to(torch.bfloat16), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].float()}, file)
    with pytest.warns(UserWarning, match="weights of type F32 are converted to BF16"):
        model = load_hf(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    load_hf(tmp_path / "out", dtype=torch.float32)  # what was asked for needs no word


def test_eight_bit_weights_are_refused(tmp_path: Path) -> None:
    save_hf(our_model("llama"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_hf(tmp_path / "out")
