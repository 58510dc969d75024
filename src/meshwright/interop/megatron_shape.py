"""The shape of a model by the flags of a Megatron-LM run; where one is absent, Megatron's own value. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig
from meshwright.interop.megatron_rules import SHAPE
from meshwright.interop.translation import Reading

GPT2_TOKENS = 50257
NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
EXPERT_SIZES = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
EXPERTS = {
    "--moe-aux-loss-coeff": "router_aux_loss_coef",
    "--moe-z-loss-coeff": "router_z_loss_coef",
    "--moe-expert-capacity-factor": "capacity_factor",
}
ABSENT = "absent: Megatron's default"
SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads")


def read_shape(reading: Reading, given: Mapping[str, Any], base: RunConfig) -> None:
    """Put the shape into model.spec; flags without one leave it to the other settings."""
    if "--seq-length" in given:
        reading.map("--seq-length", given["--seq-length"], "data.sequence_length", given["--seq-length"])
    _tokenizer(reading, given)
    taken = base.model.preset or base.model.from_hf
    if not set(SIZES) & given.keys():
        of = f"the model is '{taken}'" if taken is not None else "the model is that of the other settings"
        for flag in sorted({rule.key for rule in SHAPE} & given.keys() - reading.answered):
            reading.leave(flag, given[flag], f"{of}: {', '.join(SIZES)} are not given")
        return
    if taken is not None:
        reading.refuse(
            "--num-layers", f"and the model '{taken}' of the other settings both give a shape; leave one out"
        )
        return
    missing = [flag for flag in NEEDED if flag not in given]
    for flag in missing:
        if flag not in reading.given:
            reading.refuse(flag, "is missing: Megatron needs it, too")
    if missing:
        return
    shape = _Shape(reading, given)
    shape.sizes()
    shape.layers()
    shape.vocabulary(base)
    shape.experts()


def _tokenizer(reading: Reading, given: Mapping[str, Any]) -> None:
    """Tokens are in the files already; a tokenizer shows text."""
    kind, model = given.get("--tokenizer-type"), given.get("--tokenizer-model")
    if kind is not None:
        reading.leave("--tokenizer-type", kind, "tokens are made already")
    if model is None:
        return
    if kind == "HuggingFaceTokenizer" and Path(model).exists():
        reading.map("--tokenizer-model", model, "data.tokenizer", model)
    else:
        reading.leave("--tokenizer-model", model, "tokens are made already; data.tokenizer names one to show text")


class _Shape:
    """The flags of a shape on their way into settings."""

    def __init__(self, reading: Reading, given: Mapping[str, Any]) -> None:
        self.reading, self.given = reading, given
        self.gated = "--swiglu" in given

    def put(self, flag: str, name: str, value: Any, note: str = "") -> None:
        """A fact of the shape; where its flag is absent, Megatron's own value."""
        setting = f"model.spec.{name}"
        if flag in self.given:
            self.reading.map(flag, self.given[flag], setting, value, note)
        else:
            self.reading.assume(flag, setting, value, note or ABSENT)

    def sizes(self) -> None:
        """Widths and counts."""
        given = self.given
        width = given["--hidden-size"]
        self.put("--num-layers", "num_hidden_layers", given["--num-layers"])
        self.put("--hidden-size", "hidden_size", width)
        self.put("--num-attention-heads", "num_attention_heads", given["--num-attention-heads"])
        default = int(4 * width * 2 / 3 / 64) * 64 if self.gated else 4 * width
        self.put("--ffn-hidden-size", "intermediate_size", given.get("--ffn-hidden-size", default))
        self.put("--max-position-embeddings", "max_position_embeddings", given["--max-position-embeddings"])
        if "--kv-channels" in given:
            self.put("--kv-channels", "head_dim", given["--kv-channels"])
        if "--group-query-attention" in given:
            groups = given.get("--num-query-groups", 1)
            self.put("--num-query-groups", "num_key_value_heads", groups)
            self.reading.leave("--group-query-attention", True, "--num-query-groups says how many")
        elif "--num-query-groups" in given:
            self.reading.leave(
                "--num-query-groups", given["--num-query-groups"], "--group-query-attention is not given"
            )

    def layers(self) -> None:
        """What a layer is made of."""
        given, reading = self.given, self.reading
        norm = given.get("--normalization", "LayerNorm")
        if norm not in ("LayerNorm", "RMSNorm"):
            reading.refuse("--normalization", f"{norm} is refused: here are LayerNorm and RMSNorm")
        self.put("--normalization", "norm", norm.lower())
        self.put("--norm-epsilon", "norm_eps", given.get("--norm-epsilon", 1e-5))
        positions = given.get("--position-embedding-type", "learned_absolute")
        if positions not in ("learned_absolute", "rope"):
            reading.refuse("--position-embedding-type", f"{positions} is refused: here are learned_absolute and rope")
        learned = positions != "rope"
        self.put("--position-embedding-type", "positions", "learned" if learned else "rope")
        self._rotation(learned)
        self._activation()
        self._biases()
        tied = "--untie-embeddings-and-output-weights" not in given
        self.put("--untie-embeddings-and-output-weights", "tie_word_embeddings", tied)
        note = (
            "attention weights are never dropped here; in Megatron 0.1 of them are"
            if "--attention-dropout" not in given
            else ""
        )
        self.put("--hidden-dropout", "dropout", given.get("--hidden-dropout", 0.1), note)
        self.put("--init-method-std", "initializer_range", given.get("--init-method-std", 0.02))
        if "--qk-layernorm" in given:
            self.put("--qk-layernorm", "qk_norm", True)
        if "--window-size" in given:
            sizes = re.findall(r"-?\d+", given["--window-size"])
            if len(sizes) != 2 or int(sizes[0]) < 0 or int(sizes[1]) != 0:
                reading.refuse("--window-size", f"{given['--window-size']} is not (N,0), N tokens back and none ahead")
            else:
                self.put("--window-size", "sliding_window", int(sizes[0]) + 1)
        family = "gpt2" if learned and norm == "LayerNorm" and not self.gated else "llama"
        if "--num-experts" in given:
            family = "qwen3_moe" if "--qk-layernorm" in given else "mixtral"
        elif "--qk-layernorm" in given and family == "llama":
            family = "qwen3"
        elif "--add-qkv-bias" in given and family == "llama":
            family = "qwen2"
        reading.assume("--num-layers", "model.spec.family", family, "by whose names weights are saved")

    def _rotation(self, learned: bool) -> None:
        given, reading = self.given, self.reading
        for flag in ("--rotary-base", "--use-rope-scaling", "--rope-scaling-factor"):
            if learned and flag in given:
                reading.leave(flag, given[flag], "positions are learned")
        if learned:
            return
        self.put("--rotary-base", "rope_theta", float(given.get("--rotary-base", 10000)))
        if "--use-rope-scaling" in given:
            factor = given.get("--rope-scaling-factor", 8.0)
            reading.map("--use-rope-scaling", True, "model.spec.rope_scaling.kind", "llama3")
            self.put("--rope-scaling-factor", "rope_scaling.factor", factor)
        elif "--rope-scaling-factor" in given:
            reading.leave("--rope-scaling-factor", given["--rope-scaling-factor"], "--use-rope-scaling is not given")

    def _activation(self) -> None:
        given = self.given
        flag = next((flag for flag in ("--swiglu", "--openai-gelu", "--no-bias-gelu-fusion") if flag in given), "")
        value = {"--swiglu": "swiglu", "--no-bias-gelu-fusion": "gelu"}.get(flag, "gelu_tanh")
        note = "" if flag else "absent: Megatron's fused GELU is the one with tanh"
        self.put(flag or "--swiglu", "activation", value, note)
        for other in {"--openai-gelu", "--no-bias-gelu-fusion"} & given.keys() - {flag}:
            self.reading.leave(other, True, f"{flag} is what counts")

    def _biases(self) -> None:
        given = self.given
        bias = [] if "--disable-bias-linear" in given else ["q", "k", "v", "o", "up", "down"]
        if bias and self.gated:
            bias.append("gate")
        if not bias and "--add-qkv-bias" in given:
            bias = ["q", "k", "v"]
            self.put("--add-qkv-bias", "bias", bias)
            self.reading.leave("--disable-bias-linear", True, "but for --add-qkv-bias")
            return
        self.put("--disable-bias-linear", "bias", bias)
        if "--add-qkv-bias" in given:
            self.reading.leave("--add-qkv-bias", True, "all linears have one")

    def vocabulary(self, base: RunConfig) -> None:
        """How many tokens the embedding has: padded, as Megatron does it."""
        given, reading = self.given, self.reading
        kind, padding = given.get("--tokenizer-type"), "--make-vocab-size-divisible-by"
        # A degree that is none is refused elsewhere.
        multiple = given.get(padding, 128) * max(1, given.get("--tensor-model-parallel-size", 1))
        if multiple < 1:
            reading.refuse(padding, f"{given[padding]} must be a whole number from 1")
            return
        if padding in given:
            reading.leave(padding, given[padding], "the vocabulary is padded to it")
        if "--padded-vocab-size" in given:
            self.put("--padded-vocab-size", "vocab_size", given["--padded-vocab-size"])
            if "--vocab-size" in given:
                reading.leave("--vocab-size", given["--vocab-size"], "--padded-vocab-size is what counts")
            return
        gpt2 = kind == "GPT2BPETokenizer" or (kind is None and "--vocab-file" in given)
        tokens = given.get("--vocab-size", GPT2_TOKENS if gpt2 else None)
        if tokens is None and "vocab_size" in base.model.spec:
            return
        if tokens is None:
            reading.refuse("--vocab-size", "is missing, and the tokenizer does not tell it here; add it")
            return
        padded = -(-tokens // multiple) * multiple
        note = "GPT-2's tokenizer; " if "--vocab-size" not in given else ""
        self.put("--vocab-size", "vocab_size", padded, f"{note}{tokens} padded to a multiple of {multiple}")

    def experts(self) -> None:
        """A mixture of experts."""
        given, reading = self.given, self.reading
        if "--num-experts" not in given:
            for flag in sorted(given.keys() & {*EXPERT_SIZES, *EXPERTS}):
                reading.leave(flag, given[flag], "there are no experts: --num-experts is not given")
            return
        width = given.get("--moe-ffn-hidden-size", given.get("--ffn-hidden-size"))
        if width is None:
            reading.refuse("--moe-ffn-hidden-size", "is missing; add it, or --ffn-hidden-size")
            return
        if width < 1:
            reading.refuse("--moe-ffn-hidden-size", f"{width} must be a whole number from 1")
            return
        self.put("--num-experts", "experts.num_experts", given["--num-experts"])
        self.put("--moe-router-topk", "experts.num_experts_per_tok", given.get("--moe-router-topk", 2))
        self.put("--moe-ffn-hidden-size", "experts.moe_intermediate_size", width)
        balance = "--moe-router-load-balancing-type"
        for flag, name in EXPERTS.items():
            if flag == "--moe-aux-loss-coeff" and flag in given and given.get(balance) == "none":
                reading.leave(flag, given[flag], f"there is no such loss: {balance} none")
            elif flag in given:
                self.put(flag, f"experts.{name}", given[flag])
        flag = "--moe-shared-expert-intermediate-size"
        shared = given.get(flag, 0)
        if shared % width:
            reading.refuse(flag, f"{shared} is no multiple of an expert's {width}")
        elif flag in given:
            self.put(flag, "experts.num_shared_experts", shared // width)
