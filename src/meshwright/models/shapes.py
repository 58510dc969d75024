"""Names and shapes of a decoder's parameters, in its own order; closed form, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.spec import ModelSpec

Shape = tuple[int, ...]

SENSITIVE_LINEARS = ("*lm_head", "*.gate", "*router*")
"""Names of linears that bear coarse rounding badly: the head, whose logits decide between near equals, and routers."""


def shapes_of(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter of the decoder that the spec describes; tied weights once."""
    spec.check_buildable()
    width = spec.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, width)}
    if spec.positions == "learned":
        shapes["model.embed_positions.weight"] = (spec.max_position_embeddings, width)
    for layer in range(spec.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block(spec, layer)}
    shapes |= _norm(spec, "model.norm")
    if not spec.tie_word_embeddings:
        shapes |= _linear("lm_head", spec.vocab_size, width, "head" in spec.bias)
    return shapes


def _block(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    width = spec.hidden_size
    query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    yield from _norm(spec, "input_layernorm").items()
    for name, outputs, inputs in (("q", query, width), ("k", key, width), ("v", key, width), ("o", width, query)):
        yield from _linear(f"self_attn.{name}_proj", outputs, inputs, name in spec.bias).items()
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield from _norm(spec, "post_attention_layernorm").items()
    if not spec.is_sparse(layer):
        yield from _feed_forward(spec, "mlp", spec.intermediate_size, spec.bias)
        return
    assert spec.experts is not None
    count, inner = spec.experts.num_experts, spec.experts.moe_intermediate_size
    yield "mlp.gate.weight", (count, width)
    if spec.activation == "swiglu":
        yield "mlp.experts.gate_proj", (count, inner, width)
    yield "mlp.experts.up_proj", (count, inner, width)
    yield "mlp.experts.down_proj", (count, width, inner)
    if spec.experts.num_shared_experts:
        yield from _feed_forward(spec, "mlp.shared_experts", spec.experts.num_shared_experts * inner, ())


def _feed_forward(spec: ModelSpec, name: str, inner: int, bias: tuple[str, ...]) -> Iterator[tuple[str, Shape]]:
    if spec.activation == "swiglu":
        yield from _linear(f"{name}.gate_proj", inner, spec.hidden_size, "gate" in bias).items()
    yield from _linear(f"{name}.up_proj", inner, spec.hidden_size, "up" in bias).items()
    yield from _linear(f"{name}.down_proj", spec.hidden_size, inner, "down" in bias).items()


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(spec: ModelSpec, name: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (spec.hidden_size,)}
    return shapes | ({f"{name}.bias": (spec.hidden_size,)} if spec.norm == "layernorm" else {})
