"""The floor under a step: what must be computed and moved at least, at the speeds that this device was seen to reach.

Products and attention are counted by the planner's own closed forms. They run at the speed of a large matrix product at
best. The update comes after all of them, because clipping needs every gradient: it streams state through memory. What
moves between the products is counted where operations are fused; it could hide behind them, and does not in practice,
so it is told beside the floor and is not in it. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.config import TrainSection
from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from meshwright.planning.blocks import forward_flops, head_work, layer_work
from meshwright.planning.operations import BACKWARD_ATTENTION

WIDE = {"float32": 4, "float64": 8}
"""Bytes of an element in the wide dtypes; all others count as two."""
MOMENTS = {"adamw": 2, "sgd": 1, "adafactor": 0}
"""Values of each parameter that an optimizer keeps, reads and writes."""
BACKWARD_MOVED = 2
"""What the backward pass moves between products, over the forward pass."""


@dataclass(frozen=True)
class Ceilings:
    """What the device was seen to reach."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True)
class Work:
    """A step's least work."""

    products: float
    """FLOPs, forward and backward."""
    attention: float
    """FLOPs that a fused kernel does, forward and backward: the causal half, scores once more in the backward pass."""
    model_flops: float
    """By which MFU is told: attention at three times its forward pass, the causal half."""
    full_model_flops: float
    """The same with attention of every token to every other, as many publications count."""
    weight_bytes: float
    """Of the update: each weight read and written, and written once more in the computing dtype."""
    optimizer_bytes: float
    """Of the update: moments read and written."""
    gradient_bytes: float
    """Read for the norm of all of them, if they are clipped, and for the update."""
    between_bytes: float
    """Activations and their gradients that fused operations between the products read and write."""

    @classmethod
    def of(cls, spec: ModelSpec, tokens: float, length: float, train: TrainSection) -> Work:
        """Of a step over so many tokens."""
        flops = forward_flops(spec, tokens, length)
        moved = head_work(spec, tokens, 1, False).moved
        for layer in range(spec.num_hidden_layers):
            moved += layer_work(spec, spec.is_sparse(layer), tokens, length, 1, False, 1, 1, 1.0).moved
        element = WIDE.get(train.precision, 2)
        parameters = count_parameters(spec).total
        return cls(
            3 * flops.products,
            (1 + BACKWARD_ATTENTION) * flops.attention,
            3 * (flops.products + flops.attention),
            3 * (flops.products + flops.full_attention),
            (8 + (element if element < 4 else 0)) * parameters,
            8 * MOMENTS[train.optimizer] * parameters,
            (8 if train.grad_clip else 4) * parameters,
            (1 + BACKWARD_MOVED) * moved * element,
        )

    @property
    def update_bytes(self) -> float:
        """All that the update moves."""
        return self.weight_bytes + self.optimizer_bytes + self.gradient_bytes

    def compute_s(self, ceilings: Ceilings) -> float:
        """Of products and attention."""
        return (self.products + self.attention) / ceilings.flops

    def update_s(self, ceilings: Ceilings) -> float:
        """Of norm and optimizer."""
        return self.update_bytes / ceilings.bytes_per_s

    def between_s(self, ceilings: Ceilings) -> float:
        """Of what moves between products, if nothing of it hides."""
        return self.between_bytes / ceilings.bytes_per_s

    def floor_s(self, ceilings: Ceilings) -> float:
        """No step can take less."""
        return self.compute_s(ceilings) + self.update_s(ceilings)

    def as_json(self, ceilings: Ceilings | None) -> dict[str, Any]:
        facts: dict[str, Any] = dict(vars(self))
        if ceilings is not None:
            facts |= {"ceilings": vars(ceilings), "floor_ms": 1e3 * self.floor_s(ceilings)}
            facts |= {"compute_ms": 1e3 * self.compute_s(ceilings), "update_ms": 1e3 * self.update_s(ceilings)}
            facts |= {"between_ms": 1e3 * self.between_s(ceilings)}
        return facts


def lines(work: Work, ceilings: Ceilings, dtype: str) -> list[str]:
    """The floor in words."""
    compute, update, between = (
        1e3 * one for one in (work.compute_s(ceilings), work.update_s(ceilings), work.between_s(ceilings))
    )
    return [
        f"ceilings   a large {dtype} product {ceilings.flops / 1e12:.4g} TFLOP/s, "
        f"a copy {ceilings.bytes_per_s / 1e9:.4g} GB/s, measured in this run",
        f"compute    {compute:8.2f} ms: products {work.products / 1e12:.4g} TFLOP, causal attention "
        f"{work.attention / 1e12:.4g} TFLOP",
        f"update     {update:8.2f} ms: weights {work.weight_bytes / 1e9:.4g} GB, optimizer state "
        f"{work.optimizer_bytes / 1e9:.4g} GB, gradients {work.gradient_bytes / 1e9:.4g} GB",
        f"floor      {compute + update:8.2f} ms",
        f"between    {between:8.2f} ms more if nothing hides: {work.between_bytes / 1e9:.4g} GB that fused operations "
        "between the products move",
    ]
