"""Norms that compute in the dtype of their input, whatever their weights are stored in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.reads import seen_in


class RMSNorm(nn.RMSNorm):
    """Divides by the root of the mean square."""

    reads_itself = True

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, seen_in(self, "weight", x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """Takes the mean away and divides by the standard deviation."""

    reads_itself = True

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = seen_in(self, "weight", x.dtype), seen_in(self, "bias", x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
