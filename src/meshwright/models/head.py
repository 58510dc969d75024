"""The head of a language model: logits, or at once their cross-entropy, a few tokens at a time.

The logits of all tokens would be the largest tensor of a step by far. With targets, the head computes the logits of a
chunk of tokens, its loss, and from both the gradients of the chunk's inputs and its share of the weight's gradient, and
forgets the logits. So the backward pass has nothing left to compute, and no logit is computed twice.

Shapes: N tokens, C model width, V entries of the vocabulary (this rank's, where ranks have split it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.cross_entropy import losses_and_gradient_, scale_
from meshwright.models.linear import HALVES, Linear, add_wide_product
from meshwright.models.logit_chunks import chunk_tokens
from meshwright.models.reads import seen


@dataclass(frozen=True)
class Targets:
    """What is to be predicted."""

    tokens: Tensor
    """The next token of each; the ignored ones (-100) do not count."""
    weight: Tensor
    """The factor of the sum of losses."""


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of a vocabulary that ranks have split."""

    first: int = 0
    group: dist.ProcessGroup | None = None


WHOLE = Vocabulary()
EIGHTS = 8
"""A GPU's products of halves take rows in pieces of 16 bytes; of other lengths they are four times as slow."""


class Head(Linear):
    """The last linear layer."""

    def forward(self, x: Tensor, targets: Targets | None = None, part: Vocabulary = WHOLE) -> Tensor:
        """The logits; with targets the weighted sum of their cross-entropies instead."""
        if targets is None:
            return super().forward(x)
        x_NC, targets_N = x.reshape(-1, x.shape[-1]), targets.tokens.flatten()
        loss: Tensor = _Loss.apply(x_NC, seen(self, "weight"), seen(self, "bias"), targets_N, targets.weight, part)
        return loss


def _with_spare_rows(weight: Tensor, spare: int, dtype: torch.dtype) -> Tensor:
    """A weight or bias in the dtype of computing, with rows of zeros below."""
    if not spare:
        return weight.to(dtype)
    more = weight.new_zeros(weight.shape[0] + spare, *weight.shape[1:], dtype=dtype)
    more[: weight.shape[0]] = weight
    return more


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weight: Tensor, bias: Tensor | None, targets_N: Tensor, factor: Tensor, part: Vocabulary
    ) -> Tensor:
        learns, ctx.scaled = any(ctx.needs_input_grad), False
        entries = weight.shape[0]
        spare = -entries % EIGHTS if x_NC.dtype in HALVES else 0
        narrow = _with_spare_rows(weight, spare, x_NC.dtype)
        narrow_bias = _with_spare_rows(bias, spare, x_NC.dtype) if bias is not None else None
        # In one run, whatever the order of the inputs: a kernel scales it.
        x_grad = torch.empty_like(x_NC, memory_format=torch.contiguous_format) if learns else None
        wide = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
        weight_grad: Tensor | None = None
        bias_grad = torch.zeros_like(bias, dtype=wide) if bias is not None else None
        losses = []
        size = chunk_tokens(entries, x_NC.element_size())
        # Where there are no tokens, one chunk of none.
        for start in range(0, max(1, x_NC.shape[0]), size):
            chunk = slice(start, start + size)
            x, targets = x_NC[chunk], targets_N[chunk]
            logits = F.linear(x, narrow, narrow_bias)
            own = logits[:, :entries]
            found, gradient = losses_and_gradient_(own, targets, factor, part.first, part.group, learns)
            if spare and gradient is not None:
                # It is where the logits were; those of spare rows are zero, and so is their gradient.
                gradient = logits
            del logits, own
            losses.append(found)
            if x_grad is not None and gradient is not None:
                torch.mm(gradient, narrow, out=x_grad[chunk])
                weight_grad = add_wide_product(weight_grad, gradient.mT, x, wide)
                if bias_grad is not None:
                    bias_grad += gradient.sum(dim=0, dtype=wide)[:entries]
            # It may be where the logits were: gone before the next chunk's come.
            del gradient
        if learns and weight_grad is not None:
            ctx.save_for_backward(x_grad, weight_grad[:entries].to(weight.dtype), bias_grad)
        return torch.cat(losses).sum(dtype=torch.float64).to(wide) * factor.to(wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        # A pass that is split, first to the inputs and then to the weights, comes here twice.
        if not ctx.scaled:
            for gradient in found:
                scale_(gradient, gradients[0])
        ctx.scaled = True
        return *found, None, None, None
