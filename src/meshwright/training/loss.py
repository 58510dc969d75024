"""The loss: a sum over valid tokens. Who divides it by the global count gets the same gradient for every split."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.cross_entropy import IGNORED
from meshwright.parallel.vocabulary_loss import split_cross_entropy


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Literal["mean", "sum", "none"] = "mean") -> Tensor:
    """Cross-entropy of (..., vocabulary) logits, in float32 or wider; logits may be split over the vocabulary.

    Targets of -100 do not count: `mean` is over the valid ones, and `none` gives zero for the others.
    """
    if isinstance(logits, DTensor):
        losses_N = split_cross_entropy(logits, targets, IGNORED)
        if reduction == "none":
            return losses_N.view_as(targets)
        return losses_N.sum() / ((targets != IGNORED).sum() if reduction == "mean" else 1)
    logits_NV = logits.flatten(0, -2)
    if logits_NV.dtype in (torch.bfloat16, torch.float16):
        logits_NV = logits_NV.float()
    loss = F.cross_entropy(logits_NV, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss
