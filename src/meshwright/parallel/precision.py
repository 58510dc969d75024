"""Precision: in which dtype parameters are stored, read, summed.

Stored parameters, their gradients and the optimizer's state are float32 (float64 in proofs). With bf16 and fp16 the
model's code reads the parameters in that dtype and computes in it, whatever the strategy; where it says so itself
(softmax of a router, loss) it computes in float32. Gradients travel in `reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.parallel.reads import Transform, read_through
from meshwright.torch_private import parameters_of


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training."""

    stored: torch.dtype = torch.float32
    """Of parameters, gradients and optimizer state."""
    param: torch.dtype = torch.float32
    """Of parameters where the model computes with them, and so of activations."""
    reduce: torch.dtype = torch.float32
    """Of gradients where they are summed over ranks."""
    buffer: torch.dtype | None = torch.float32
    """Of the model's own state that is not trained; None leaves it as it is."""

    @property
    def mixed(self) -> bool:
        """Whether the model computes in another dtype than it stores."""
        return self.param != self.stored


def apply(model: nn.Module, precision: Precision) -> None:
    """Let the model's code read its parameters in the dtype to compute in, and give its buffers theirs."""
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if precision.mixed and parameter is not None and parameter.is_floating_point():
                read_through(module, name, _cast_to(precision.param))
        for name, buffer in module._buffers.items():
            if precision.buffer and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(precision.buffer)


def _cast_to(dtype: torch.dtype) -> Transform:
    def cast(parameter: Tensor) -> Tensor:
        return parameter.to(dtype)

    return cast
