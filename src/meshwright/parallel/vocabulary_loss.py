"""Cross-entropy of logits that are split over the vocabulary: they are never gathered.

Each rank knows the exponentials of its own entries; the largest logit, the sum of exponentials and the logit of the
target are agreed upon, three numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.parts import box_of


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        entries = logits_NV.shape[1]
        largest_N = logits_NV.amax(dim=1) if entries else logits_NV.new_full(targets_N.shape, float("-inf"))
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - largest_N[:, None]
        place_N = targets_N - first
        here_N = (place_N >= 0) & (place_N < entries)
        place_N = place_N.clamp(0, max(0, entries - 1))
        target_N = shifted_NV.gather(1, place_N[:, None])[:, 0] if entries else torch.zeros_like(largest_N)
        exponentials_NV = shifted_NV.exp_()
        both = torch.stack((exponentials_NV.sum(dim=1), torch.where(here_N, target_N, 0.0)))
        dist.all_reduce(both, group=group)
        sum_N, target_N = both
        ctx.save_for_backward(exponentials_NV.div_(sum_N[:, None]), place_N, here_N)
        return sum_N.log() - target_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities_NV, place_N, here_N = ctx.saved_tensors
        if probabilities_NV.shape[1]:
            probabilities_NV.scatter_add_(1, place_N[:, None], -here_N[:, None].to(probabilities_NV.dtype))
        return probabilities_NV.mul_(gradients[0][:, None]), None, None, None


def split_cross_entropy(logits: DTensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each target (zero where it is `ignored`), from logits split over their last dimension."""
    mesh = logits.device_mesh
    first = box_of(logits).offset[-1]
    local = logits.to_local().flatten(0, -2)
    if local.dtype in (torch.bfloat16, torch.float16):
        local = local.float()
    losses_N = _SplitCrossEntropy.apply(local, targets.flatten(), first, mesh.get_group())
    return torch.where(targets.flatten() == ignored, 0.0, losses_N)
