"""The experts of a mixture: their weights stacked, applied to rows that are grouped by expert.

Two ways to the same result: one product of groups where the device has it, else a loop over the experts that have rows.

Shapes: R rows, E experts, C model width, I expert width.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.feed_forward import activation
from meshwright.models.spec import ModelSpec

_ALIGNMENT = 16
"""Bytes of which the rows of a grouped product must be a multiple."""


class StackedExperts(nn.Module):
    """The experts' weights, each kind one tensor whose first dimension is the expert."""

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

    def forward(self, x_RC: Tensor, counts: list[int]) -> Tensor:
        """Apply expert e to its rows; rows are grouped by expert, counts[e] of them each."""
        if can_group(x_RC, self.up_proj):
            return self.all_at_once(x_RC, counts)
        return self.one_by_one(x_RC, counts)

    def all_at_once(self, x_RC: Tensor, counts: list[int]) -> Tensor:
        """By products of groups."""
        ends_E = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x_RC.device)
        inner_RI = F.grouped_mm(x_RC, self.up_proj.mT, offs=ends_E)
        gate_RI = F.grouped_mm(x_RC, self.gate_proj.mT, offs=ends_E) if self.gated else None
        return F.grouped_mm(self._activate(inner_RI, gate_RI), self.down_proj.mT, offs=ends_E)

    def one_by_one(self, x_RC: Tensor, counts: list[int]) -> Tensor:
        """By a loop over the experts."""
        ups, downs = self.up_proj.unbind(), self.down_proj.unbind()
        gates = self.gate_proj.unbind() if self.gated else ups
        outputs = []
        for expert, rows in enumerate(x_RC.split(counts)):
            # The first one is applied even to nothing: a pass without a row has gradients too, and they are zero.
            if rows.shape[0] == 0 and expert > 0:
                continue
            gate = F.linear(rows, gates[expert]) if self.gated else None
            outputs.append(F.linear(self._activate(F.linear(rows, ups[expert]), gate), downs[expert]))
        return torch.cat(outputs)

    def _activate(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        return self.activation(inner) if gate is None else self.activation(gate) * inner


def can_group(x_RC: Tensor, weight_EIC: Tensor) -> bool:
    """Whether the device has grouped products that are faster than a loop, for these rows and weights."""
    if x_RC.dtype != torch.bfloat16 or not x_RC.is_cuda or x_RC.shape[0] == 0:
        return False
    aligned = all(size * x_RC.element_size() % _ALIGNMENT == 0 for size in weight_EIC.shape[1:])
    return aligned and torch.cuda.get_device_capability(x_RC.device) >= (9, 0)
