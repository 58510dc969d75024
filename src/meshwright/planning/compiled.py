"""What a compiled layer keeps for its backward pass: the compiler's choice in closed forms. No torch.

Found by compiling layers and counting, which `tests/parity/test_compiled_layers.py` does again:

    none        inputs and results of all products, attention's inputs and output, weights that were rounded
    selective   results of products and attention's inputs and output: norms and activations are computed again
    budget:F    of those products' results the ones that are dearest to compute, as long as what they take is no more
                than the share F of what selective keeps beside the layer's input; attention's output never
"""

from __future__ import annotations

from itertools import compress, product
from typing import NamedTuple

from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.blocks import AttentionShape, Product, Work
from meshwright.planning.scenario import Scenario


class Kept(NamedTuple):
    """What a layer keeps of one micro-batch, in bytes."""

    attention: float
    """With the norms."""
    feed_forward: float
    casts: float = 0.0
    """Weights in the dtype of computing."""
    again: tuple[Product, ...] = ()
    """Products that are computed again."""
    attends_again: bool = False


class _Result(NamedTuple):
    """A product's result that the backward pass needs, or the part of it that one module makes."""

    product: Product
    of_attention: bool = False
    beside: float = 0.0
    """Elements that are kept with it: queries and keys as they were rotated, rows as experts get them."""
    activated: float = 0.0
    """Elements that the activation makes of it, for the next product."""

    @property
    def elements(self) -> float:
        """Of the result."""
        return self.product.rows * self.product.outer * self.product.times


def compiled_layer(scenario: Scenario, work: Work, sparse: bool) -> Kept:
    """What a compiled layer keeps, unless it is computed again as a whole."""
    spec, layout, element = scenario.spec, scenario.layout, scenario.element
    shape = AttentionShape.of(spec, layout.tp)
    results = _results(scenario, shape, sparse)
    held = blocks.layer_parameters(spec, sparse, layout.tp, layout.ep, layout.expert_tp)
    merged = (shape.q + shape.kv) * spec.hidden_size if scenario.merges_products else 0.0
    attended = scenario.tokens * (shape.o + shape.low_rank)
    attention, inner, casts = work.input + attended, 0.0, 0.0
    sums = work.saved_bytes
    kind, _, share = layout.recompute.partition(":")
    kept = [True] * len(results)
    if kind == "budget":
        # As the compiler counts: attention's output twice, for it is seen in two forms; weights that are put together
        # less what they take as they are stored, which a layer that keeps nothing has as inputs.
        room = (sum(one.elements for one in results) + 2 * attended) * element + work.saved_bytes
        room += merged * (element - scenario.held_bytes[0])
        kept = _dearest(results, float(share) * room / element)
        attention, sums = float(work.input), 0.0
    elif scenario.dtype == "fp8":
        attention += scenario.tokens * shape.o / 2
        if kind != "selective":
            # What was cast for a product in 8 bits is turned around in the backward pass, else cast again.
            attention += (2 * work.input + work.gathered) / 2
            inner += sum(one.activated for one in results if not one.product.experts) / 2
        casts = merged / 2 + (held.experts if scenario.rounds_weights and kind != "selective" else 0.0)
    elif kind == "selective":
        casts = merged
    else:
        attention += 2 * work.input + work.gathered
        inner += sum(one.activated for one in results)
        casts = held.all if scenario.rounds_weights else 0.0
    for one in compress(results, kept):
        if one.of_attention:
            attention += one.elements + one.beside
        else:
            inner += one.elements + one.beside
    norms = 2 * 4.0 * work.input / spec.hidden_size * (2 if spec.norm == "layernorm" else 1)
    again = tuple(one.product for one, is_kept in zip(results, kept, strict=True) if not is_kept)
    return Kept(attention * element + sums + norms, inner * element, casts * element, again, kind == "budget")


def _results(scenario: Scenario, shape: AttentionShape, sparse: bool) -> list[_Result]:
    """Results of products that the backward pass needs: all but those that are only added to the residual."""
    spec, layout, tokens = scenario.spec, scenario.layout, scenario.tokens
    width, key = spec.hidden_size, shape.kv / 2
    if scenario.merges_products:
        # Values stay where the product has put them, and so the rest of it does.
        rotated = shape.q + key if spec.positions == "rope" or spec.qk_norm else 0.0
        found = [_Result(Product(tokens, width, shape.q + shape.kv), True, tokens * rotated)]
    else:
        found = [_Result(Product(tokens, width, size), True) for size in (shape.q, key, key)]
    between = tokens / layout.tp if layout.sp else tokens
    found.append(_Result(Product(between, shape.o, width), True))
    together = scenario.merges_products and scenario.dtype == scenario.wide
    if not sparse:
        return found + _ups(spec, Product(tokens, width, spec.intermediate_size / layout.tp), together)
    assert spec.experts is not None
    experts = spec.experts
    own = tokens / (layout.tp if layout.expert_tp == 1 and layout.sp else 1) * experts.num_experts_per_tok
    local = experts.num_experts / layout.ep
    rows, inner = own * scenario.imbalance / local, experts.moe_intermediate_size / layout.expert_tp
    found += _ups(spec, Product(rows, width, inner, times=local, experts=True), False)
    found.append(_Result(Product(rows, inner, width, times=local, experts=True), beside=rows * local * width))
    if experts.num_shared_experts:
        shared = experts.num_shared_experts * experts.moe_intermediate_size / layout.tp
        found += _ups(spec, Product(tokens, width, shared), together)
    return found


def _ups(spec: ModelSpec, up: Product, together: bool) -> list[_Result]:
    """The products into a feed-forward: gate and up may be one."""
    inner = _Result(up).elements
    if spec.activation != "swiglu":
        return [_Result(up, activated=inner)]
    if together:
        return [_Result(up._replace(outer=2 * up.outer), activated=inner)]
    return [_Result(up, activated=inner), _Result(up)]


def _dearest(results: list[_Result], room: float) -> list[bool]:
    """Which of some results to keep in so many elements, so that the others are computed again in the least time."""

    choices: list[tuple[bool, ...]] = list(product((True, False), repeat=len(results)))
    fitting = [one for one in choices if sum(kept.elements for kept in compress(results, one)) <= room]
    return list(
        max(fitting, key=lambda one: sum(kept.elements * kept.product.inner for kept in compress(results, one)))
    )
