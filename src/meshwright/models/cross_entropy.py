"""Cross-entropies of logits and their gradient, in place where a kernel can.

The vocabulary may be split over ranks: each knows the exponentials of its own entries; the largest logit, the sum of
exponentials and the logit of the target are agreed upon, three numbers for each token. Logits are never gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.linear import HALVES

IGNORED = -100
"""A target with this value is not a valid token and does not count."""


def losses_and_gradient_(
    logits_NV: Tensor,
    targets_N: Tensor,
    factor: Tensor,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
    learns: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The cross-entropy of each target (0 where it is ignored), and the gradient of the sum of them times the factor.

    The logits may be overwritten; in 16 bits the gradient takes their place. They are the entries of the vocabulary
    from `first` on, where a group has split it.
    """
    if group is None and logits_NV.is_cuda and logits_NV.dtype in HALVES:
        from meshwright.models.cross_entropy_kernel import losses_and_gradient_ as fused

        return fused(logits_NV, targets_N, factor, learns)
    counts_N = targets_N != IGNORED
    losses_N, probabilities_NV, place_N, here_N = softmax_losses(logits_NV, targets_N, first, group)
    losses_N = torch.where(counts_N, losses_N, 0.0)
    if not learns:
        return losses_N, None
    gradient_NV = subtract_targets_(probabilities_NV, place_N, here_N)
    gradient_NV.mul_((counts_N * factor).to(gradient_NV.dtype)[:, None])
    return losses_N, logits_NV.copy_(gradient_NV) if logits_NV.dtype in HALVES else gradient_NV


def softmax_losses(
    logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropies, probabilities, where among these entries the targets are, and whether they are among them."""
    entries = logits_NV.shape[1]
    if logits_NV.dtype in HALVES:
        logits_NV = logits_NV.float()
    largest_N = logits_NV.amax(dim=1) if entries else logits_NV.new_full(targets_N.shape, float("-inf"))
    if group is not None:
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - largest_N[:, None]
    place_N = targets_N - first
    here_N = (place_N >= 0) & (place_N < entries)
    place_N = place_N.clamp(0, max(0, entries - 1))
    target_N = shifted_NV.gather(1, place_N[:, None])[:, 0] if entries else torch.zeros_like(largest_N)
    exponentials_NV = shifted_NV.exp_()
    both = torch.stack((exponentials_NV.sum(dim=1), torch.where(here_N, target_N, 0.0)))
    if group is not None:
        dist.all_reduce(both, group=group)
    sum_N, target_N = both
    return sum_N.log() - target_N, exponentials_NV.div_(sum_N[:, None]), place_N, here_N


def subtract_targets_(probabilities_NV: Tensor, place_N: Tensor, here_N: Tensor) -> Tensor:
    """The gradient of cross-entropies, in the memory of the probabilities."""
    if probabilities_NV.shape[1]:
        probabilities_NV.scatter_add_(1, place_N[:, None], -here_N[:, None].to(probabilities_NV.dtype))
    return probabilities_NV


def scale_(values: Tensor | None, factor: Tensor) -> None:
    """Multiply in place by a single number, which mostly is one; unseen by autograd."""
    if values is None:
        return
    if values.is_cuda and values.dtype != torch.float64:
        from meshwright.models.cross_entropy_kernel import scale_ as fused

        fused(values, factor)
    else:
        values.data.mul_(factor.to(values.dtype))
