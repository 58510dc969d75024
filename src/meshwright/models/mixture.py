"""Mixture of experts: a softmax router that sends each token to a few of many experts, and how the load is kept even.

- The balancing loss (E times the sum over experts of token share x mean probability) and the router's z-loss (mean over
  tokens of the squared log-sum of exponentials) are not returned: their gradient is attached to the layer's output, so
  that it needs no path of its own through pipelines, recomputation or wrappers.
- The balancing bias moves by a fixed step towards the idle experts after each optimizer step and only steers the
  choice, never the weights.
- With a capacity an expert takes so many tokens of each sequence, the first ones; that depends neither on how samples
  are dealt out to ranks nor on later tokens. A choice that finds no room adds nothing. It holds in training only.

Shapes: N tokens, E experts, K chosen experts per token, C model width; B sequences of T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.feed_forward import FeedForward
from meshwright.models.linear import Linear
from meshwright.models.rows import put_rows, take_rows
from meshwright.models.spec import ModelSpec
from meshwright.models.stacked_experts import StackedExperts


class Mixture(nn.Module):
    """A feed-forward that sends each token to a few of many experts; names are those of Qwen3-MoE's `mlp`."""

    expert_bias: Tensor
    expert_load: Tensor
    dropped: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        self.facts = spec.experts
        self.gate = Linear(spec.hidden_size, spec.experts.num_experts, bias=False)
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
        self.register_buffer("dropped", torch.zeros(1, dtype=torch.int64), persistent=False)
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
        logits_NE = self.gate(x_NC).to(_at_least_float32(x_NC.dtype))
        probabilities_NE = F.softmax(logits_NE, dim=-1)
        chosen_NK, weights_NK = self._choose(probabilities_NE)
        taken_NK = self._drop(chosen_NK, x_BTC.shape[:2])
        counts_E = how_often(taken_NK, self.facts.num_experts)
        order = taken_NK.flatten().argsort(stable=True)
        if taken_NK is not chosen_NK:
            # What found no room comes last. Only here must the host know how much that is.
            order = order[: int(counts_E.sum())]
        rows = self.experts(take_rows(x_NC, order, self.facts.num_experts_per_tok), counts_E)
        y_RC = put_rows(rows, order, chosen_NK.numel())
        y_NKC = y_RC.unflatten(0, chosen_NK.shape)
        y_NC = (y_NKC * weights_NK[..., None].to(rows.dtype)).sum(dim=1)
        if self.training:
            load_E = self._count(chosen_NK, order.numel())
            y_NC = self._attach_losses(y_NC, logits_NE, probabilities_NE, load_E)
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

    def _drop(self, chosen_NK: Tensor, batch: torch.Size) -> Tensor:
        """The chosen experts with a number beyond the last one where an expert has no room left."""
        facts = self.facts
        if facts.capacity_factor is None or not self.training:
            return chosen_NK
        capacity = math.ceil(facts.capacity_factor * batch[1] * facts.num_experts_per_tok / facts.num_experts)
        asks_BTE = F.one_hot(chosen_NK, facts.num_experts).sum(dim=1).unflatten(0, batch)
        place_NE = asks_BTE.cumsum(dim=1).flatten(0, 1)
        return chosen_NK.masked_fill(place_NE.gather(1, chosen_NK) > capacity, facts.num_experts)

    def _count(self, chosen_NK: Tensor, taken: int) -> Tensor:
        """How often each expert was chosen; added to the load of this step."""
        load_E = how_often(chosen_NK, self.facts.num_experts)
        if not self.repeating:
            self.expert_load += load_E
            self.dropped += chosen_NK.numel() - taken
        return load_E

    def _attach_losses(self, y_NC: Tensor, logits_NE: Tensor, probabilities_NE: Tensor, load_E: Tensor) -> Tensor:
        """The output, with the router's losses attached to it."""
        facts, loss = self.facts, None
        if not (facts.router_aux_loss_coef or facts.router_z_loss_coef):
            return y_NC
        if self.data_group is not None:
            # The share of tokens is taken over all data ranks; it has no gradient, so each rank's own probabilities
            # then contribute exactly their part of the global loss.
            load_E = load_E.clone()
            dist.all_reduce(load_E, group=self.data_group)
        # Counted, since ranks that split a sequence may have different numbers of tokens.
        tokens = load_E.sum() / facts.num_experts_per_tok
        if facts.router_aux_loss_coef:
            mean_E = probabilities_NE.sum(dim=0) / tokens
            share_E = load_E.to(mean_E.dtype) / (tokens * facts.num_experts_per_tok)
            balance = facts.num_experts * (share_E * mean_E).sum()
            self.auxiliary_loss = balance.detach()
            loss = facts.router_aux_loss_coef * balance
        if facts.router_z_loss_coef:
            z_loss = facts.router_z_loss_coef * logits_NE.logsumexp(dim=-1).square().sum() / tokens
            loss = z_loss if loss is None else loss + z_loss
        assert loss is not None
        return _AttachLoss.apply(y_NC, loss * (self.auxiliary_scale * self.auxiliary_factor))


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


def how_often(numbers: Tensor, count: int) -> Tensor:
    """How often each number below a count comes (the count itself may come, too); unlike bincount without waiting."""
    flat = numbers.flatten()
    sums = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return sums.scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    """The mixture layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, Mixture))


@dataclass(frozen=True)
class StepLoad:
    """How often a step's tokens have chosen each expert of a model, on all data ranks; still on the device."""

    layers: tuple[tuple[Mixture, Tensor], ...]
    """This rank's mixtures, and the load of each one's experts."""
    numbers: Tensor | None
    """What the metrics are made of; None where no layer of the model is a mixture."""

    @torch.no_grad()
    def move_biases(self) -> None:
        """Let the balancing biases answer the load."""
        for layer, load_E in self.layers:
            if layer.facts.router_bias_update_rate:
                layer.expert_bias += layer.facts.router_bias_update_rate * (load_E.double().mean() - load_E).sign()


@torch.no_grad()
def step_load(model: nn.Module, stages: dist.ProcessGroup | None = None) -> StepLoad:
    """The load of the step whose passes are done; counting starts anew.

    Nobody waits for the device. Where `stages` hold the layers of a model with experts, they must all ask.
    """
    layers = list(mixtures(model))
    if not layers and stages is None:
        return StepLoad((), None)
    # The largest share; dropped and all choices; whether there is a capacity.
    held = layers[0].expert_load if layers else next(model.parameters())
    found = torch.zeros(4, dtype=torch.float64, device=held.device)
    loads = []
    if layers:
        counted = torch.cat([count for layer in layers for count in (layer.expert_load, layer.dropped)])
        if layers[0].data_group is not None:
            dist.all_reduce(counted, group=layers[0].data_group)
        for layer, count in zip(layers, counted.split([layer.facts.num_experts + 1 for layer in layers]), strict=True):
            load_E = count[:-1]
            loads.append((layer, load_E))
            found[0] = torch.maximum(found[0], load_E.max() / load_E.double().mean())
            found[1] += count[-1]
            found[2] += load_E.sum()
            layer.expert_load.zero_()
            layer.dropped.zero_()
        found[3] = float(layers[0].facts.capacity_factor is not None)
    if stages is not None:
        each = [torch.empty_like(found) for _ in range(dist.get_world_size(stages))]
        dist.all_gather(each, found, group=stages)
        found = torch.stack(each)
        found = torch.cat((found[:, :1].max(dim=0).values, found[:, 1:].sum(dim=0)))
    return StepLoad(tuple(loads), found)


def load_metrics(numbers: Sequence[float]) -> dict[str, float]:
    """`expert_load_max`, the largest share of an expert in a layer times the number of experts (1 is even), and with a
    capacity `dropped`, the share of choices that found no room; of what `StepLoad.numbers` holds."""
    if not numbers or not numbers[2]:
        return {}
    largest, dropped, chosen, has_capacity = numbers
    return {"expert_load_max": largest} | ({"dropped": dropped / chosen} if has_capacity else {})
