"""Whether a run's attention has no fused kernel, told before the first step instead of found out from its speed."""

from __future__ import annotations

import torch

from meshwright.config import RunConfig
from meshwright.context_layout import ContextLayout
from meshwright.models.attention_kernels import PLAIN, capability_of, math_reason
from meshwright.models.linear import HALVES
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy
from meshwright.training.precision import precision_of


def slow_attention(config: RunConfig, spec: ModelSpec, strategy: Strategy, device: torch.device) -> str | None:
    """Why attention takes plain products on a GPU though nobody asked for them; None where it does not."""
    dtype, length = precision_of(config).param, config.data.sequence_length
    windowed = spec.sliding_window is not None and spec.sliding_window < length
    masked = config.data.mask_documents or windowed
    if strategy.cp > 1 and ContextLayout.of(strategy.cp, strategy.cp_method).ring > 1:
        return _slow_ring(device, dtype, spec.head_dim, masked)
    return math_reason(device, dtype, spec.head_dim, masked=masked)


def _slow_ring(device: torch.device, dtype: torch.dtype, head_size: int, masked: bool) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return None
    if masked:
        return f"{PLAIN}: a ring of cp ranks has no kernel for documents and windows; cp_method=ulysses has"
    if dtype not in HALVES or head_size % 8 or head_size > 256 or capability_of(device) < 80:
        return f"{PLAIN}: a ring of cp ranks has a kernel for bf16 and fp16, for heads of up to 256 in multiples of 8"
    return None
