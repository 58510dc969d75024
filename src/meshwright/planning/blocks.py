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
    width, heads, groups = spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads
    between = tokens / tp if sp else tokens
    held_groups = max(1.0, groups / tp)
    latent = spec.latent_attention
    products: list[Product] = []
    if latent is not None:
        query, value = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
        low = latent.kv_lora_rank + latent.qk_rope_head_dim
        if latent.q_lora_rank:
            products.append(Product(tokens, width, latent.q_lora_rank))
            products.append(Product(tokens, latent.q_lora_rank, heads * query / tp))
        else:
            products.append(Product(tokens, width, heads * query / tp))
        products.append(Product(tokens, width, low))
        products.append(Product(tokens, latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + value) / tp))
        products.append(Product(tokens, heads * value / tp, width))
        q, kv, o = heads * query / tp, heads * (query + value) / tp, heads * value / tp
        per_score = (query + value) / 2
        low_rank = latent.q_lora_rank + low
    else:
        q, kv, o = heads * spec.head_dim / tp, 2 * held_groups * spec.head_dim, heads * spec.head_dim / tp
        products.append(Product(tokens, width, q + kv))
        products.append(Product(tokens, o, width))
        per_score = spec.head_dim
        low_rank = 0
    attended = length / 2
    if spec.sliding_window is not None and spec.sliding_window < length:
        attended = spec.sliding_window - spec.sliding_window**2 / (2 * length)
    attention_flops = 4 * tokens * attended * heads / tp * per_score
    # Two norms (read, write), two additions to the residual (two reads, a write), rotation of queries and keys.
    moved = 10 * between * width + 2 * tokens * (q + kv / 2)
    cast = tokens * (width + o)
    saved = 4 * between * width + tokens * (q + kv + o + low_rank)
    selective = between * width * 2 + tokens * (q + kv + o + low_rank) + between * width
    saved_bytes = 4.0 * tokens * heads / tp
    gated = spec.activation == "swiglu"
    inner_saved = 0.0
    exchanged = 0.0
    if not sparse:
        inner = spec.intermediate_size / tp
        up = 2 if gated else 1
        products.append(Product(tokens, width, up * inner))
        products.append(Product(tokens, inner, width))
        moved += (up + 1) * tokens * inner
        cast += tokens * (width + inner)
        saved += tokens * inner * (0 if gated else 2)
        inner_saved = tokens * inner if gated else 0.0
        selective += up * tokens * inner + between * width
    else:
        assert spec.experts is not None
        experts = spec.experts
        # Rows of this rank's experts: what its data-parallel group would route, its share, and the imbalance.
        own = tokens / (tp if expert_tp == 1 and sp else 1) * experts.num_experts_per_tok
        rows = own * imbalance
        local = experts.num_experts / ep
        inner = experts.moe_intermediate_size / expert_tp
        up = 2 if gated else 1
        products.append(Product(between, width, experts.num_experts, narrow=False))
        products.append(Product(rows / local, width, up * inner, times=local))
        products.append(Product(rows / local, inner, width, times=local))
        # Rows are sorted, computed with, weighted and put back.
        moved += (up + 1) * rows * inner + 6 * rows * width
        cast += rows * (width + inner)
        saved += rows * width * 2 + (rows * inner * 2 if not gated else 0)
        inner_saved = rows * inner if gated else 0.0
        selective += up * rows * inner + 2 * rows * width
        saved_bytes += 4.0 * between * experts.num_experts * 2
        exchanged = own * width if ep > 1 else 0.0
        if experts.num_shared_experts:
            shared = experts.num_shared_experts * experts.moe_intermediate_size / tp
            products.append(Product(tokens, width, up * shared))
            products.append(Product(tokens, shared, width))
            moved += (up + 1) * tokens * shared
            cast += tokens * (width + shared)
            inner_saved += tokens * shared if gated else 0.0
            saved += 0 if gated else 2 * tokens * shared
            selective += up * tokens * shared
    if spec.dropout:
        saved_bytes += 2 * between * width
        moved += 2 * between * width
    return Work(
        products=tuple(products),
        attention_flops=attention_flops,
        scores=tokens * length * heads / tp,
        head_dim=per_score,
        moved=moved,
        cast=cast,
        saved=saved,
        saved_inner=inner_saved,
        saved_selective=selective,
        saved_bytes=saved_bytes,
        gathered=2 * (tokens - between) * width,
        input=between * width,
        tp_elements=tokens * width if tp > 1 else 0.0,
        exchanged=exchanged,
        kv_elements=tokens * kv,
        qo_elements=tokens * (q + o),
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


def training_flops(spec: ModelSpec, tokens: float, length: float) -> float:
    """Model FLOPs of a step: forward and backward, causal attention at half, nothing computed again; embeddings not."""
    total = 0.0
    for layer in range(spec.num_hidden_layers):
        work = layer_work(spec, spec.is_sparse(layer), tokens, length, 1, False, 1, 1, 1.0)
        total += sum(2 * one.rows * one.inner * one.outer * one.times for one in work.products) + work.attention_flops
    return 3 * (total + 2 * tokens * spec.hidden_size * spec.vocab_size)
