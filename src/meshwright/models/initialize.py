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
from meshwright.models.parts import box_of
from meshwright.models.spec import ModelSpec

_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""How many values at a time: pieces that stay in a core's cache, or that keep a GPU busy."""


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


def fill_normal(tensor: Tensor, seed: int, name: str, deviation: float) -> None:
    """Fill a tensor, or this rank's part of it, with its normal values."""
    local, offset, shape = box_of(tensor)
    if local.numel() == 0:
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Positions of one row of the part in the whole, then all rows a few at a time.
    inner = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64, device=local.device)
    for dim in range(1, len(shape)):
        places = torch.arange(offset[dim], offset[dim] + local.shape[dim], device=local.device) * strides[dim]
        inner = inner + places.view(-1, *(1,) * (len(shape) - 1 - dim))
    key = key_of(seed, name)
    rows = max(1, _PIECE.get(local.device.type, 1 << 16) // max(1, inner.numel()))
    for start in range(0, local.shape[0], rows):
        row = torch.arange(start, min(start + rows, local.shape[0]), device=local.device) + offset[0]
        index = inner + (row * strides[0]).view(-1, *(1,) * (len(shape) - 1))
        local[start : start + rows] = (normal(key, index) * deviation).to(local.dtype)


def build_meta(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder without memory, to be split before it gets any."""
    with torch.device("meta"):
        return Decoder(spec).to(dtype)


def materialise(model: Decoder, device: torch.device | str) -> Decoder:
    """Give a decoder on the meta device its memory; the values are for the caller to fill in."""
    model = model.to_empty(device=device)
    model.tie()
    for buffer in model.buffers():
        buffer.zero_()
    return model


def build_empty(spec: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A whole decoder whose memory is there and whose values are not: for weights that come from a file."""
    return materialise(build_meta(spec, dtype), device)


def build(
    spec: ModelSpec, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A whole decoder with fresh weights."""
    model = build_empty(spec, device, dtype)
    initialize(model, spec, seed)
    model.dropout_seed = seed
    return model
