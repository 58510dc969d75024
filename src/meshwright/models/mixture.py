"""Mixture of experts: a softmax router, stacked expert weights, two ways of keeping the load even.

- The balancing loss (E times the sum over experts of token share x mean probability) is not returned: its gradient is
  attached to the layer's output, so that it needs no path of its own through pipelines, recomputation or wrappers.
- The balancing bias moves by a fixed step towards the idle experts after each optimizer step and only steers the
  choice, never the weights.

Shapes: N tokens, E experts, K chosen experts per token, C model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.feed_forward import FeedForward, activation
from meshwright.models.spec import ModelSpec


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
        outputs = []
        for expert, rows in enumerate(x_RC.split(counts)):
            if rows.shape[0] == 0:
                continue
            inner = F.linear(rows, self.up_proj[expert])
            if self.gated:
                inner = self.activation(F.linear(rows, self.gate_proj[expert])) * inner
            else:
                inner = self.activation(inner)
            outputs.append(F.linear(inner, self.down_proj[expert]))
        return torch.cat(outputs)


class Mixture(nn.Module):
    """A feed-forward that sends each token to a few of many experts; names are those of Qwen3-MoE's `mlp`."""

    expert_bias: Tensor
    expert_load: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        self.facts = spec.experts
        self.gate = nn.Linear(spec.hidden_size, spec.experts.num_experts, bias=False)
        self.experts = StackedExperts(spec)
        if spec.experts.num_shared_experts:
            shared = spec.experts.num_shared_experts * spec.experts.moe_intermediate_size
            self.shared_experts = FeedForward(spec, shared, bias=False)
        self.has_shared = spec.experts.num_shared_experts > 0
        # Only the bias is state worth saving; the load is counted anew in every step.
        persistent = spec.experts.router_bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(spec.experts.num_experts), persistent=persistent)
        # A whole number stays exact in a bfloat16 model, where counts above 256 would not.
        load = torch.zeros(spec.experts.num_experts, dtype=torch.int64)
        self.register_buffer("expert_load", load, persistent=False)
        # Set from outside: the ranks whose tokens count as one batch, the share of this micro-step in the step, by
        # what the balancing loss is multiplied so that it counts once when gradients have been reduced over ranks,
        # and whether this forward pass is one that was counted before.
        self.data_group: dist.ProcessGroup | None = None
        self.auxiliary_scale = 1.0
        self.auxiliary_factor = 1.0
        self.repeating = False
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
        probabilities_NE = F.softmax(self.gate(x_NC).to(_at_least_float32(x_NC.dtype)), dim=-1)
        chosen_NK, weights_NK = self._choose(probabilities_NE)
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=self.facts.num_experts)
        order = chosen_NK.flatten().argsort(stable=True)
        rows = self.experts(x_NC[order // self.facts.num_experts_per_tok], counts_E.tolist())
        y_NKC = torch.empty_like(rows).index_copy(0, order, rows).view(*chosen_NK.shape, -1)
        y_NC = (y_NKC * weights_NK[..., None].to(rows.dtype)).sum(dim=1)
        if self.training:
            y_NC = self._balance(y_NC, probabilities_NE, counts_E)
        if self.has_shared:
            y_NC = y_NC + self.shared_experts(x_NC)
        return y_NC.view_as(x_BTC)

    def _choose(self, probabilities_NE: Tensor) -> tuple[Tensor, Tensor]:
        scores = probabilities_NE + self.expert_bias.to(probabilities_NE.dtype)
        chosen_NK = scores.topk(self.facts.num_experts_per_tok, dim=-1).indices
        weights_NK = probabilities_NE.gather(-1, chosen_NK)
        if self.facts.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        return chosen_NK, weights_NK

    def _balance(self, y_NC: Tensor, probabilities_NE: Tensor, counts_E: Tensor) -> Tensor:
        """Count the load of this step and attach the balancing loss to the output."""
        load_E = counts_E
        if not self.repeating:
            self.expert_load += load_E
        if not self.facts.router_aux_loss_coef:
            return y_NC
        if self.data_group is not None:
            # The share of tokens is taken over all data ranks; it has no gradient, so each rank's own
            # probabilities then contribute exactly their part of the global loss.
            load_E = load_E.clone()
            dist.all_reduce(load_E, group=self.data_group)
        # Counted, since ranks that split a sequence may have different numbers of tokens.
        choices = load_E.sum()
        mean_E = probabilities_NE.sum(dim=0) * self.facts.num_experts_per_tok / choices
        share_E = load_E.to(mean_E.dtype) / choices
        loss = self.facts.num_experts * (share_E * mean_E).sum()
        self.auxiliary_loss = loss.detach()
        weight = self.facts.router_aux_loss_coef * self.auxiliary_scale * self.auxiliary_factor
        return _AttachLoss.apply(y_NC, loss * weight)


class _AttachLoss(torch.autograd.Function):
    """Hands its input through; in the backward pass the loss gets gradient one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    """The mixture layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, Mixture))


@torch.no_grad()
def finish_step(model: nn.Module) -> None:
    """After an optimizer step: move the balancing biases by the whole step's load, and start counting anew."""
    for mixture in mixtures(model):
        if mixture.facts.router_bias_update_rate:
            load_E = mixture.expert_load
            if mixture.data_group is not None:
                dist.all_reduce(load_E, group=mixture.data_group)
            mixture.expert_bias += mixture.facts.router_bias_update_rate * (load_E.double().mean() - load_E).sign()
        mixture.expert_load.zero_()
