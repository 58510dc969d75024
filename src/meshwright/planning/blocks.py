"""What one layer, and each end of the model, computes, moves, keeps and holds on one rank. Closed forms, no torch.

Everything is for one micro-batch on one rank: `tokens` are those of the rank under context parallel. Between the
matrices tensor-parallel ranks share the tokens (sequence parallel) or repeat each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from meshwright.models.spec import ModelSpec

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def remembered(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Results kept by the identity of the spec and the other arguments: hashing a spec takes longer than the sums."""
    kept: dict[Any, tuple[Any, Output]] = {}

    @wraps(function)
    def call(*inputs: Inputs.args, **options: Inputs.kwargs) -> Output:
        key = (id(inputs[0]), *inputs[1:])
        # The spec is kept too, so that its identity stays its own.
        if key not in kept:
            if len(kept) > 50_000:
                kept.clear()
            kept[key] = inputs[0], function(*inputs, **options)
        return kept[key][1]

    return call


class Product(NamedTuple):
    """A matrix product of the forward pass: rows x inner by inner x outer, so many times."""

    rows: float
    inner: float
    outer: float
    narrow: bool = True
    """Whether it is one of those that are computed in fp8 or fp4 where the rest is not."""
    times: float = 1
    experts: bool = False
    """Whether the matrices are those of stacked experts."""


@dataclass(frozen=True)
class Work:
    """A layer's forward pass, or that of one end of the model."""

    products: tuple[Product, ...]
    attention_flops: float = 0.0
    """Of both products of attention, as fused kernels do them: the causal half."""
    scores: float = 0.0
    """Elements of attention's scores, for software that writes them out."""
    head_dim: float = 128
    moved: float = 0.0
    """Elements that operations between the products read and write when they are fused."""
    cast: float = 0.0
    """Elements of the inputs and gradients that products in narrow dtypes need cast."""
    saved: float = 0.0
    """Elements of an activation kept for the backward pass, without attention's scores and the feed-forward's part."""
    saved_inner: float = 0.0
    """Those of the feed-forward's inner width: times the software's `mlp_saved` less one."""
    saved_selective: float = 0.0
    """Elements kept where only what is dear to compute is kept."""
    saved_bytes: float = 0.0
    """Bytes kept that are no activations of the computing dtype: sums of attention, routing."""
    gathered: float = 0.0
    """Elements more that are kept where the inputs of both halves are kept as tensor-parallel ranks gathered them."""
    input: float = 0.0
    """Elements of the layer's input: what a recomputed layer keeps."""
    tp_elements: float = 0.0
    """Elements of a tensor that tensor-parallel ranks gather or sum; four times in a forward and backward pass."""
    exchanged: float = 0.0
    """Elements of rows that experts' ranks send each other, once; four times in a forward and backward pass."""
    kv_elements: float = 0.0
    """Elements of keys and values that context-parallel ranks pass around."""
    qo_elements: float = 0.0
    """Elements of queries and outputs, which all-to-all context parallel exchanges too."""

    @cached_property
    def results(self) -> float:
        """Elements of all products' results: what their gradients take that wait to be multiplied."""
        return sum(one.rows * one.outer * one.times for one in self.products)

    @cached_property
    def widest(self) -> float:
        """Elements of the widest product's larger side."""
        return max(one.rows * max(one.inner, one.outer) * one.times for one in self.products)


@dataclass(frozen=True)
class Held:
    """Parameters of a layer on one rank, before they are sharded."""

    plain: float
    """Those that every data-parallel rank has."""
    experts: float = 0.0
    """Those of the experts that are dealt out over data ranks."""
    small: float = 0.0
    """Of the plain ones, vectors and others that tensor parallel does not split."""

    @property
    def all(self) -> float:
        return self.plain + self.experts


class _Part(NamedTuple):
    """What one part of a layer adds to its work; the fields are those of `Work`."""

    products: tuple[Product, ...]
    moved: float
    cast: float
    saved: float
    saved_selective: float
    saved_inner: float = 0.0
    saved_bytes: float = 0.0
    exchanged: float = 0.0


@remembered
def layer_work(
    spec: ModelSpec,
    sparse: bool,
    tokens: float,
    length: float,
    tp: int,
    sp: bool,
    ep: int,
    expert_tp: int,
    imbalance: float,
) -> Work:
    """The work of a layer; `length` is that of a sequence, all of which a token can attend to."""
    width, heads = spec.hidden_size, spec.num_attention_heads
    between = tokens / tp if sp else tokens
    shape = AttentionShape.of(spec, tp)
    if sparse:
        rest = _mixture(spec, tokens, between, tp, sp, ep, expert_tp, imbalance)
    else:
        rest = _feed_forward(spec, tokens, between, spec.intermediate_size / tp)
    parts = [_attention(spec, shape, tokens, between, tp), rest, _norms(spec, between)]
    attended = length / 2
    if spec.sliding_window is not None and spec.sliding_window < length:
        attended = spec.sliding_window - spec.sliding_window**2 / (2 * length)
    return Work(
        products=tuple(one for part in parts for one in part.products),
        attention_flops=4 * tokens * attended * heads / tp * shape.per_score,
        scores=tokens * length * heads / tp,
        head_dim=shape.per_score,
        moved=sum(part.moved for part in parts),
        cast=sum(part.cast for part in parts),
        saved=sum(part.saved for part in parts),
        saved_inner=sum(part.saved_inner for part in parts),
        saved_selective=sum(part.saved_selective for part in parts),
        saved_bytes=sum(part.saved_bytes for part in parts),
        gathered=2 * (tokens - between) * width,
        input=between * width,
        tp_elements=tokens * width if tp > 1 else 0.0,
        exchanged=rest.exchanged,
        kv_elements=tokens * shape.kv,
        qo_elements=tokens * (shape.q + shape.o),
    )


class AttentionShape(NamedTuple):
    """Elements of a token in attention, on one rank."""

    q: float
    kv: float
    o: float
    per_score: float
    """Elements of a head, on average of both products."""
    low_rank: float
    """Of the narrow tensors through which latent attention goes."""

    @classmethod
    def of(cls, spec: ModelSpec, tp: int) -> AttentionShape:
        heads, latent = spec.num_attention_heads, spec.latent_attention
        if latent is None:
            size = spec.head_dim
            held_groups = max(1.0, spec.num_key_value_heads / tp)
            return cls(heads * size / tp, 2 * held_groups * size, heads * size / tp, size, 0)
        query, value = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
        low_rank = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
        return cls(heads * query / tp, heads * (query + value) / tp, heads * value / tp, (query + value) / 2, low_rank)


def attention_products(spec: ModelSpec, tokens: float) -> tuple[Product, ...]:
    """Those of a layer's products that are attention's, where one rank has all of it."""
    return _attention(spec, AttentionShape.of(spec, 1), tokens, tokens, 1).products


def _attention(spec: ModelSpec, shape: AttentionShape, tokens: float, between: float, tp: int) -> _Part:
    """Attention with its products."""
    width, heads, latent = spec.hidden_size, spec.num_attention_heads, spec.latent_attention
    products: list[Product] = []
    if latent is None:
        products.append(Product(tokens, width, shape.q + shape.kv))
    else:
        if latent.q_lora_rank:
            products.append(Product(tokens, width, latent.q_lora_rank))
            products.append(Product(tokens, latent.q_lora_rank, shape.q))
        else:
            products.append(Product(tokens, width, shape.q))
        products.append(Product(tokens, width, latent.kv_lora_rank + latent.qk_rope_head_dim))
        outer = heads * (latent.qk_nope_head_dim + latent.v_head_dim) / tp
        products.append(Product(tokens, latent.kv_lora_rank, outer))
    products.append(Product(tokens, shape.o, width))
    kept = tokens * (shape.q + shape.kv + shape.o + shape.low_rank)
    return _Part(
        products=tuple(products),
        # Rotation of queries and keys.
        moved=2 * tokens * (shape.q + shape.kv / 2),
        cast=tokens * (width + shape.o),
        saved=kept,
        saved_selective=kept + between * width,
        saved_bytes=4.0 * tokens * heads / tp,
    )


def _norms(spec: ModelSpec, between: float) -> _Part:
    """Two norms (read, write), two additions to the residual (two reads, a write), masks of dropout."""
    width = spec.hidden_size
    masks = 2 * between * width if spec.dropout else 0.0
    return _Part(
        products=(),
        moved=10 * between * width + masks,
        cast=0.0,
        saved=4 * between * width,
        saved_selective=2 * between * width,
        saved_bytes=masks,
    )


def _feed_forward(spec: ModelSpec, tokens: float, between: float, inner: float) -> _Part:
    """A feed-forward of that inner width on this rank."""
    width, gated = spec.hidden_size, spec.activation == "swiglu"
    up = 2 if gated else 1
    return _Part(
        products=(Product(tokens, width, up * inner), Product(tokens, inner, width)),
        moved=(up + 1) * tokens * inner,
        cast=tokens * (width + inner),
        saved=0.0 if gated else 2 * tokens * inner,
        saved_selective=up * tokens * inner + between * width,
        saved_inner=tokens * inner if gated else 0.0,
    )


def _mixture(
    spec: ModelSpec, tokens: float, between: float, tp: int, sp: bool, ep: int, expert_tp: int, imbalance: float
) -> _Part:
    """Router, this rank's experts with the rows that they get, shared experts."""
    assert spec.experts is not None
    experts, width, gated = spec.experts, spec.hidden_size, spec.activation == "swiglu"
    up = 2 if gated else 1
    # Rows of this rank's experts: what its data-parallel group would route, its share, and the imbalance.
    own = tokens / (tp if expert_tp == 1 and sp else 1) * experts.num_experts_per_tok
    rows = own * imbalance
    local = experts.num_experts / ep
    inner = experts.moe_intermediate_size / expert_tp
    routed = _Part(
        products=(
            Product(between, width, experts.num_experts, narrow=False),
            Product(rows / local, width, up * inner, times=local, experts=True),
            Product(rows / local, inner, width, times=local, experts=True),
        ),
        # Rows are sorted, computed with, weighted and put back.
        moved=(up + 1) * rows * inner + 6 * rows * width,
        cast=rows * (width + inner),
        saved=rows * width * 2 + (0.0 if gated else rows * inner * 2),
        saved_selective=up * rows * inner + 2 * rows * width,
        saved_inner=rows * inner if gated else 0.0,
        saved_bytes=4.0 * between * experts.num_experts * 2,
        exchanged=own * width if ep > 1 else 0.0,
    )
    if not experts.num_shared_experts:
        return routed
    # Shared experts read what the router reads: it is kept once.
    shared = _feed_forward(spec, tokens, 0.0, experts.num_shared_experts * experts.moe_intermediate_size / tp)
    return routed._replace(
        products=routed.products + shared.products,
        moved=routed.moved + shared.moved,
        cast=routed.cast + shared.cast,
        saved=routed.saved + shared.saved,
        saved_selective=routed.saved_selective + shared.saved_selective,
        saved_inner=routed.saved_inner + shared.saved_inner,
    )


@remembered
def layer_parameters(spec: ModelSpec, sparse: bool, tp: int, ep: int, expert_tp: int) -> Held:
    """The parameters of a layer on one rank."""
    width, heads, groups = spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads
    norms = 2 * width * (2 if spec.norm == "layernorm" else 1)
    small = float(norms)
    latent = spec.latent_attention
    if latent is not None:
        query = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        small += width * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
        cut = float(heads * latent.v_head_dim * width)
        cut += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        if latent.q_lora_rank:
            small += width * latent.q_lora_rank + latent.q_lora_rank
            cut += latent.q_lora_rank * heads * query
        else:
            cut += width * heads * query
        attention = cut / tp
    else:
        query_size = heads * spec.head_dim / tp
        # Key-value heads that are fewer than the ranks are held by several of them.
        key_size = groups * spec.head_dim / (tp if groups % tp == 0 else 1)
        attention = 2 * width * query_size + 2 * width * key_size
        sizes = {"q": query_size, "k": key_size, "v": key_size}
        attention += sum(size for name, size in sizes.items() if name in spec.bias)
        small += width if "o" in spec.bias else 0
        small += 2 * spec.head_dim if spec.qk_norm else 0
    matrices = 3 if spec.activation == "swiglu" else 2
    if not sparse:
        inner = spec.intermediate_size / tp
        plain = attention + matrices * width * inner
        plain += sum(inner for name in ("gate", "up") if name in spec.bias)
        small += width if "down" in spec.bias else 0
        return Held(plain + small, 0.0, small)
    assert spec.experts is not None
    experts = spec.experts
    small += width * experts.num_experts
    shared = matrices * width * experts.num_shared_experts * experts.moe_intermediate_size / tp
    dealt = matrices * width * experts.moe_intermediate_size / expert_tp * experts.num_experts / ep
    return Held(attention + shared + small, dealt, small)


@remembered
def ends_parameters(spec: ModelSpec, tp: int) -> tuple[float, float]:
    """Parameters of the model's ends on one rank: embeddings; last norm and head (tied weights are in both)."""
    table = spec.vocab_size * spec.hidden_size / tp
    first = table + (spec.max_position_embeddings * spec.hidden_size if spec.positions == "learned" else 0)
    last = spec.hidden_size * (2 if spec.norm == "layernorm" else 1) + table
    last += spec.vocab_size / tp if "head" in spec.bias else 0
    return first, last


def head_work(spec: ModelSpec, tokens: float, tp: int, sp: bool) -> Work:
    """The last norm and the head; its products stay in a wide dtype."""
    between = tokens / tp if sp else tokens
    vocabulary = spec.vocab_size / tp
    return Work(
        products=(Product(tokens, spec.hidden_size, vocabulary, narrow=False),),
        moved=3 * between * spec.hidden_size,
        saved=2 * between * spec.hidden_size,
        input=between * spec.hidden_size,
        tp_elements=tokens * spec.hidden_size if tp > 1 else 0.0,
    )


class Flops(NamedTuple):
    """Of a forward pass on one rank; embeddings are looked up, not multiplied."""

    products: float
    attention: float
    """As fused kernels do it: the causal half."""
    full_attention: float
    """Every token with every other."""


def forward_flops(spec: ModelSpec, tokens: float, length: float) -> Flops:
    """FLOPs of a forward pass over so many tokens, in sequences of that length."""
    works = [
        layer_work(spec, spec.is_sparse(layer), tokens, length, 1, False, 1, 1, 1.0)
        for layer in range(spec.num_hidden_layers)
    ]
    ends = head_work(spec, tokens, 1, False)
    return Flops(
        sum(2 * one.rows * one.inner * one.outer * one.times for work in (*works, ends) for one in work.products),
        sum(work.attention_flops for work in works),
        sum(4 * work.scores * work.head_dim for work in works),
    )


def training_flops(spec: ModelSpec, tokens: float, length: float) -> float:
    """Model FLOPs of a step: forward and backward, causal attention at half, nothing computed again; embeddings not."""
    flops = forward_flops(spec, tokens, length)
    return 3 * (flops.products + flops.attention)
