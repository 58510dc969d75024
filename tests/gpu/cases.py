"""What is proved on a GPU: shapes that its kernels take, and strategies of two and four ranks."""

from __future__ import annotations

from meshwright.models.spec import Experts, ModelSpec
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case

# Vocabulary and feed-forward are divisible by neither 2 nor 4; heads are as small as flash kernels take them.
_DENSE = ModelSpec(
    vocab_size=67,
    hidden_size=128,
    intermediate_size=58,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=64,
)
_EXPERTS = Experts(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    num_shared_experts=1,
    router_aux_loss_coef=0.01,
    router_bias_update_rate=0.01,
    first_k_dense_replace=1,
)
_GPT = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "dropout": 0.1}
SPECS = {
    "dense": _DENSE,
    "tied": _DENSE.model_copy(update={"tie_word_embeddings": True}),
    "window": _DENSE.model_copy(update={"sliding_window": 5}),
    "gpt": ModelSpec.model_validate(_DENSE.model_dump() | _GPT | {"bias": ("q", "k", "v", "o", "up", "down")}),
    "experts": _DENSE.model_copy(update={"experts": _EXPERTS}),
    # Few words, so that the one which ends a document comes often.
    "short documents": _DENSE.model_copy(update={"vocab_size": 9}),
}
DOCUMENTS = {"data": {"mask_documents": True}}

FLOAT64 = [
    ("dense", "dp=2"),
    ("gpt", "dp=4"),
    ("tied", "dp=4 zero=1"),
    ("dense", "dp=4 zero=2"),
    ("gpt", "dp=2 zero=3 wrap=block"),
    ("tied", "dp=4 zero=3"),
    ("dense", "dp=4 zero=2 replicate=2"),
    ("experts", "dp=4 zero=3 replicate=2"),
    ("dense", "dp=2 zero=3 offload=parameters"),
    ("tied", "dp=2 offload=optimizer"),
    ("dense", "dp=2 shares=3+1"),
    ("dense", "dp=1 tp=2"),
    ("gpt", "dp=1 tp=4"),
    ("tied", "dp=1 tp=4 sp=off"),
    ("dense", "dp=2 tp=2 zero=1"),
    ("experts", "dp=2 tp=2 zero=3 recompute=full"),
    ("experts", "dp=2 ep=2"),
    ("experts", "dp=4 ep=4 zero=1"),
    ("experts", "dp=4 ep=2 zero=3"),
    ("experts", "dp=2 ep=2 tp=2 recompute=selective"),
    ("tied", "dp=1 pp=2 schedule=gpipe"),
    ("tied", "dp=1 pp=4 schedule=1f1b"),
    ("dense", "dp=1 pp=2 schedule=interleaved:2"),
    ("gpt", "dp=1 pp=2 schedule=zero-bubble"),
    ("tied", "dp=1 pp=2 schedule=zbv"),
    ("dense", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("tied", "dp=2 pp=2 zero=2 schedule=zbv"),
    ("dense", "dp=2 pp=2 zero=3 schedule=1f1b"),
    ("gpt", "dp=1 pp=2 tp=2 schedule=zero-bubble recompute=full"),
    ("experts", "dp=2 pp=2 ep=2"),
    ("dense", "dp=1 cp=2"),
    ("gpt", "dp=1 cp=4"),
    ("window", "dp=1 cp=4 recompute=selective"),
    ("dense", "dp=1 cp=4 cp_method=ulysses"),
    ("tied", "dp=1 cp=4 cp_method=ulysses:2"),
    ("experts", "dp=2 cp=2 zero=3"),
    ("dense", "dp=1 cp=2 tp=2"),
    ("tied", "dp=1 cp=2 pp=2"),
]
NARROW = [
    ("dense", "dp=4", "float32"),
    ("tied", "dp=2 zero=2", "float32"),
    ("dense", "dp=1 tp=4", "float32"),
    ("experts", "dp=4 ep=2 zero=3", "float32"),
    ("tied", "dp=1 pp=4", "float32"),
    ("dense", "dp=1 cp=4", "float32"),
    ("dense", "dp=4", "bf16"),
    ("tied", "dp=4 zero=3", "bf16"),
    ("gpt", "dp=4 zero=2 replicate=2", "bf16"),
    ("dense", "dp=2 tp=2 zero=3 recompute=selective", "bf16"),
    ("experts", "dp=4 ep=2 zero=3", "bf16"),
    ("experts", "dp=2 ep=2 tp=2", "bf16"),
    ("tied", "dp=2 pp=2 zero=2 schedule=zbv", "bf16"),
    ("dense", "dp=1 pp=2 tp=2 schedule=zero-bubble", "bf16"),
    ("dense", "dp=1 cp=4", "bf16"),
    ("window", "dp=1 cp=4 cp_method=ulysses", "bf16"),
    ("tied", "dp=1 cp=2 pp=2 schedule=interleaved:2", "bf16"),
    ("dense", "dp=2 zero=1", "fp16"),
]


def case_of(shape: str, strategy: str, precision: str = "float64", **facts: object) -> Case:
    """A case of three steps with four micro-batches each."""
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    batch = 32 if "shares" in strategy else 16
    return Case(SPECS[shape], strategy, ranks, precision, micro_steps=4, batch=batch, **facts)  # type: ignore[arg-type]
