"""Rotary positions: the angle of each (position, frequency) pair and the rotation of queries and keys.

Angles are computed from positions when they are needed, not kept in a buffer: a buffer would be lost when a model is
built on the meta device, and split sequences need the angles of their own positions only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """The angular frequencies of the head's channel pairs, float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=device).float() / spec.head_dim
    plain = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    return plain / scaling.factor if scaling.kind == "linear" else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend between."""
    wavelengths = 2 * math.pi / plain
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def angles(spec: ModelSpec, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (batch, 1, tokens, head_dim), computed in float32 or wider."""
    width = torch.float64 if dtype == torch.float64 else torch.float32
    angle_BTF = positions_BT.to(width)[..., None] * frequencies(spec, positions_BT.device).to(width)
    angle_B1TD = torch.cat((angle_BTF, angle_BTF), dim=-1)[:, None]
    return angle_B1TD.cos().to(dtype), angle_B1TD.sin().to(dtype)


def rotate(x_BHTD: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + head_dim / 2), the pairing of Hugging Face's weights."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cosines + torch.cat((-second, first), dim=-1) * sines
