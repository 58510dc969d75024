"""Small shapes that between them have everything a spec can switch on."""

from __future__ import annotations

from meshwright.models.spec import Experts, ModelSpec

_BASE = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
_EXPERTS = Experts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
_SHARED = _EXPERTS.model_copy(update={"num_shared_experts": 2})


def small(**changes: object) -> ModelSpec:
    """The plain shape with some facts changed."""
    return ModelSpec.model_validate(_BASE | changes)


SPECS = {
    "plain": small(),
    "as many key-value heads": small(num_key_value_heads=4),
    "one key-value head": small(num_key_value_heads=1),
    "wide heads": small(head_dim=10),
    "gpt2-like": small(
        family="gpt2",
        num_key_value_heads=4,
        norm="layernorm",
        positions="learned",
        activation="gelu_tanh",
        bias=("q", "k", "v", "o", "up", "down"),
        dropout=0.1,
        tie_word_embeddings=True,
    ),
    "learned positions without biases": small(positions="learned"),
    "layernorm": small(norm="layernorm"),
    "some biases": small(bias=("k", "o", "gate", "down")),
    "qk norm": small(qk_norm=True, bias=("q", "k", "v")),
    "tied": small(tie_word_embeddings=True),
    "head bias": small(bias=("head",)),
    "all biases": small(bias=("q", "k", "v", "o", "gate", "up", "down", "head")),
    "one layer": small(num_hidden_layers=1),
    "many layers": small(num_hidden_layers=12),
    "experts": small(experts=_EXPERTS),
    "shared experts": small(experts=_SHARED, qk_norm=True),
    "gelu experts": small(experts=_SHARED, activation="gelu"),
    "experts and biases": small(experts=_SHARED, bias=("q", "gate", "up", "down"), tie_word_embeddings=True),
    "experts after a dense layer": small(
        num_hidden_layers=5,
        experts=_SHARED.model_copy(update={"first_k_dense_replace": 1, "decoder_sparse_step": 2}),
        bias=("up", "down"),
    ),
    "experts that are balanced": small(
        experts=_EXPERTS.model_copy(update={"router_aux_loss_coef": 0.01, "router_bias_update_rate": 0.01})
    ),
}

PLANNED = ModelSpec(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=4096,
)
"""Small for a GPU, large enough for its times to be more than latency."""
