"""FLOPs of a model's modules for one sequence, by closed form: what a plan reckons with. Without torch.

Attention counts every token with every other, as operators do; fused kernels compute the causal half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.models.spec import ModelSpec
from meshwright.planning.blocks import Product, attention_products, head_work, layer_work

PROJECTIONS = "attention: q, k, v, o"
PAIRS = "attention: pairs of tokens"
DENSE = "feed-forward"
MIXTURE = "mixture of experts"
HEAD = "head"


@dataclass(frozen=True)
class ModuleFlops:
    """One kind of module, all of that kind in the model together."""

    name: str
    count: int
    """How many of them the model has."""
    forward: float
    backward: float


def module_flops(spec: ModelSpec, length: int) -> list[ModuleFlops]:
    """Every kind of module that multiplies; a backward pass takes each product twice."""
    layers = range(spec.num_hidden_layers)
    work = {
        sparse: layer_work(spec, sparse, length, length, 1, False, 1, 1, 1.0)
        for sparse in set(map(spec.is_sparse, layers))
    }
    attention = attention_products(spec, length)
    any_layer = next(iter(work.values()))
    found = [
        (PROJECTIONS, len(layers), _flops(attention)),
        (PAIRS, len(layers), 4 * any_layer.scores * any_layer.head_dim),
    ]
    for sparse, name in ((False, DENSE), (True, MIXTURE)):
        if sparse in work:
            count = sum(spec.is_sparse(layer) == sparse for layer in layers)
            found.append((name, count, _flops(work[sparse].products) - _flops(attention)))
    found.append((HEAD, 1, _flops(head_work(spec, length, 1, False).products)))
    return [ModuleFlops(name, count, count * each, 2 * count * each) for name, count, each in found]


def _flops(products: tuple[Product, ...]) -> float:
    return sum(2 * one.rows * one.inner * one.outer * one.times for one in products)
