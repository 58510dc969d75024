"""Cross-entropy of logits that are split over the vocabulary, for loops of one's own: they are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.cross_entropy import softmax_losses, subtract_targets_
from meshwright.models.parts import box_of


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        losses_N, *kept = softmax_losses(logits_NV, targets_N, first, group)
        ctx.save_for_backward(*kept)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return subtract_targets_(*ctx.saved_tensors).mul_(gradients[0][:, None]), None, None, None


def split_cross_entropy(logits: DTensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each target (zero where it is `ignored`), from logits split over their last dimension."""
    mesh = logits.device_mesh
    first = box_of(logits).offset[-1]
    local = logits.to_local().flatten(0, -2)
    if local.dtype in (torch.bfloat16, torch.float16):
        local = local.float()
    losses_N = _SplitCrossEntropy.apply(local, targets.flatten(), first, mesh.get_group())
    return torch.where(targets.flatten() == ignored, 0.0, losses_N)
