"""The loss: a sum over valid tokens. Who divides it by the global count gets the same gradient for every split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.vocabulary_loss import split_cross_entropy

IGNORED = -100
"""A target with this value is not a valid token and does not count."""


def summed_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy summed over the valid targets, in float32 or wider; logits may be split over the vocabulary."""
    if isinstance(logits_BTV, DTensor):
        return split_cross_entropy(logits_BTV, targets_BT, IGNORED).sum()
    logits = logits_BTV.flatten(0, 1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
