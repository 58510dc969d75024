"""Fresh weights: each value is a function of (seed, parameter name, position in the whole tensor) and of nothing else.

So a rank that holds a part of a parameter computes that part alone, and every split of a model starts from the same
weights. Work goes in pieces, so that the float64 intermediates stay small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.models.counter_random import key_of, normal
from meshwright.models.decoder import Decoder
from meshwright.models.spec import ModelSpec

_PIECE = 1 << 16  # float64 and int64 pieces of this size stay in a core's cache


def _deviation(spec: ModelSpec, name: str) -> float:
    """Standard deviation of a weight: projections into the residual shrink with depth."""
    into_residual = name.endswith((".o_proj.weight", ".down_proj.weight", ".down_proj"))
    return spec.initializer_range / math.sqrt(2 * spec.num_hidden_layers) if into_residual else spec.initializer_range


@torch.no_grad()
def initialize(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter of the model in place."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif "norm." in name:
            parameter.fill_(1.0)
        else:
            fill_normal(parameter, seed, name, _deviation(spec, name))


def fill_normal(whole: Tensor, seed: int, name: str, deviation: float) -> None:
    """Fill a contiguous tensor with its normal values."""
    flat = whole.view(-1)
    key = key_of(seed, name)
    for start in range(0, flat.numel(), _PIECE):
        index = torch.arange(start, min(start + _PIECE, flat.numel()), device=flat.device)
        flat[start : start + _PIECE] = (normal(key, index) * deviation).to(flat.dtype)


def build_empty(spec: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder whose memory is there and whose values are not: for weights that come from a file."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    model.tie()
    for buffer in model.buffers():
        buffer.zero_()
    return model


def build(
    spec: ModelSpec, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder with fresh weights."""
    model = build_empty(spec, device, dtype)
    initialize(model, spec, seed)
    model.dropout_seed = seed
    return model
