"""The experts of a mixture: their weights stacked, applied to rows that are grouped by expert.

Two ways to the same result: one product of groups where the device has it, else a loop over the experts that have rows.

Shapes: R rows, E experts, C model width, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.feed_forward import activation
from meshwright.models.grouped_product import grouped_product
from meshwright.models.reads import seen_in
from meshwright.models.spec import ModelSpec

_ALIGNMENT = 16
"""Bytes of which the rows of a grouped product must be a multiple."""


class StackedExperts(nn.Module):
    """The experts' weights, each kind one tensor whose first dimension is the expert."""

    reads_itself = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        count, inner, width = spec.experts.num_experts, spec.experts.moe_intermediate_size, spec.hidden_size
        self.activation = activation(spec.activation)
        self.gated = spec.activation == "swiglu"
        if self.gated:
            self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x_RC: Tensor, counts_E: Tensor) -> Tensor:
        """Apply expert e to its rows; rows are grouped by expert, counts[e] of them each."""
        up = self._weight("up_proj", x_RC)
        weights = up, self._weight("down_proj", x_RC), self._weight("gate_proj", x_RC) if self.gated else None
        return (self.all_at_once if can_group(x_RC, up) else self.one_by_one)(x_RC, counts_E, *weights)

    def all_at_once(self, x_RC: Tensor, counts_E: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
        """By products of groups; the host need not know the counts."""
        ends_E = counts_E.cumsum(dim=0, dtype=torch.int32)
        inner_RI = grouped_product(x_RC, up, ends_E)
        gate_RI = grouped_product(x_RC, gate, ends_E) if gate is not None else None
        return grouped_product(self._activate(inner_RI, gate_RI), down, ends_E)

    def one_by_one(self, x_RC: Tensor, counts_E: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
        """By a loop over the experts."""
        ups, downs = up.unbind(), down.unbind()
        gates = gate.unbind() if gate is not None else ups
        outputs = []
        for expert, rows in enumerate(x_RC.split(counts_E.tolist())):
            # The first one is applied even to nothing: a pass without a row has gradients too, and they are zero.
            if rows.shape[0] == 0 and expert > 0:
                continue
            gate_RI = F.linear(rows, gates[expert]) if self.gated else None
            outputs.append(F.linear(self._activate(F.linear(rows, ups[expert]), gate_RI), downs[expert]))
        return torch.cat(outputs)

    def _weight(self, name: str, x_RC: Tensor) -> Tensor:
        weight = seen_in(self, name, x_RC.dtype)
        assert weight is not None
        return weight

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        return self.activation(inner) if gate is None else self.activation(gate) * inner


def can_group(x_RC: Tensor, weight_EIC: Tensor) -> bool:
    """Whether the device has grouped products that are faster than a loop, for these rows and weights."""
    if x_RC.dtype != torch.bfloat16 or not x_RC.is_cuda or x_RC.shape[0] == 0:
        return False
    aligned = all(size * x_RC.element_size() % _ALIGNMENT == 0 for size in weight_EIC.shape[1:])
    return aligned and torch.cuda.get_device_capability(x_RC.device) >= (9, 0)
