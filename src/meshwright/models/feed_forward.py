"""The dense feed-forward: SwiGLU (gate, up, down) or GELU (up, down)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.linear import Linear, linears
from meshwright.models.spec import ModelSpec


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The pointwise function of a spec's `activation`."""
    match name:
        case "swiglu":
            return F.silu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return _gelu_tanh
        case _:
            raise AssertionError(name)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """Feed-forward of one layer; parameter names are Hugging Face's `mlp`."""

    def __init__(self, spec: ModelSpec, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.gated = spec.activation == "swiglu"
        self.activation = activation(spec.activation)
        if self.gated:
            self.gate_proj = Linear(spec.hidden_size, inner, bias=bias and "gate" in spec.bias)
        self.up_proj = Linear(spec.hidden_size, inner, bias=bias and "up" in spec.bias)
        self.down_proj = Linear(inner, spec.hidden_size, bias=bias and "down" in spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(self.up_proj(x))
        gate, up = linears(x, self.gate_proj, self.up_proj, apart=True)
        return self.activation(gate) * up
