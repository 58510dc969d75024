"""How many parameters a spec has, in total and at work for one token; closed form, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.models.spec import ModelSpec


@dataclass(frozen=True)
class ParameterCount:
    """Counts of weights; `active` is what one token passes through (chosen and shared experts only)."""

    total: int
    active: int


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """The exact number of parameters of the model that the spec describes."""
    norm = spec.hidden_size * (2 if spec.norm == "layernorm" else 1)
    embeddings = spec.vocab_size * spec.hidden_size
    if spec.positions == "learned":
        embeddings += spec.max_position_embeddings * spec.hidden_size
    head = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    head += spec.vocab_size if "head" in spec.bias else 0
    total = active = embeddings + norm + head
    for layer in range(spec.num_hidden_layers):
        shared = _attention(spec) + 2 * norm
        all_experts, used_experts = _feed_forward(spec, layer)
        total += shared + all_experts
        active += shared + used_experts
    return ParameterCount(total, active)


def _attention(spec: ModelSpec) -> int:
    width, heads = spec.hidden_size, spec.num_attention_heads
    if (latent := spec.latent_attention) is not None:
        query_head = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        query = width * latent.q_lora_rank + latent.q_lora_rank + latent.q_lora_rank * heads * query_head
        key_value = width * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
        key_value += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + key_value + heads * latent.v_head_dim * width
    query_size, key_size = heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    weights = 2 * width * query_size + 2 * width * key_size
    sizes = {"q": query_size, "k": key_size, "v": key_size, "o": width}
    biases = sum(size for name, size in sizes.items() if name in spec.bias)
    return weights + biases + (2 * spec.head_dim if spec.qk_norm else 0)


def _feed_forward(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """All parameters of the layer's feed-forward, and those that one token uses."""
    if not spec.is_sparse(layer):
        dense = _dense(spec, spec.intermediate_size)
        return dense, dense
    assert spec.experts is not None
    experts = spec.experts
    # The bias that balances experts is a buffer: it gets no gradient.
    router = spec.hidden_size * experts.num_experts
    # Experts and shared experts have no biases, as in every published family.
    matrices = 3 if spec.activation == "swiglu" else 2
    expert = matrices * spec.hidden_size * experts.moe_intermediate_size
    always = router + experts.num_shared_experts * expert
    return always + experts.num_experts * expert, always + experts.num_experts_per_tok * expert


def _dense(spec: ModelSpec, inner: int) -> int:
    matrices = 3 if spec.activation == "swiglu" else 2
    sizes = {"gate": inner, "up": inner, "down": spec.hidden_size}
    return matrices * spec.hidden_size * inner + sum(size for name, size in sizes.items() if name in spec.bias)
