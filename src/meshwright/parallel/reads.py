"""What a module sees when it reads its own parameters in a forward pass, and what happens around that pass.

Models are written for one device. A split model stores its parameters as DTensors, whole in name and shape, while its
code must see this rank's part, in the dtype to compute in. So for the time of a module's forward pass an attribute
stands before each such parameter; at all other times, and for everybody who asks for `parameters()`, there is what is
stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.torch_private import parameters_of

Transform = Callable[[Tensor], Tensor]
Forward = Callable[..., Tensor]


def read_through(module: nn.Module, name: str, *transforms: Transform) -> None:
    """From now on, the module's forward pass sees these functions of what it saw of that parameter before."""
    if "_reads" not in module.__dict__:
        module.__dict__["_reads"] = {}
        # After the hooks that gather parameters and before those that put them away again.
        module.register_forward_pre_hook(_show)
        module.register_forward_hook(_hide, always_call=True)
    reads: dict[str, tuple[Transform, ...]] = module.__dict__["_reads"]
    reads[name] = (*reads.get(name, ()), *transforms)


def around_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """From now on, the module's forward pass is `wrapper(forward, *inputs)`."""
    module.forward = partial(wrapper, module.forward)


def show_inside(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """A forward pass that runs without the module's hooks, as a repeated one does, and sees what it should."""
    if "_reads" not in module.__dict__:
        return forward(*inputs, **options)
    _show(module, None)
    try:
        return forward(*inputs, **options)
    finally:
        _hide(module)


def _show(module: nn.Module, _: object) -> None:
    stored = parameters_of(module)
    for name, transforms in module.__dict__["_reads"].items():
        value: Tensor | None = stored[name]
        if value is not None:
            for transform in transforms:
                value = transform(value)
            # Around nn.Module's own rule that a parameter's name takes nothing else.
            object.__setattr__(module, name, value)


def _hide(module: nn.Module, *_: object) -> None:
    for name in module.__dict__["_reads"]:
        module.__dict__.pop(name, None)


class _Part(torch.autograd.Function):
    """This rank's part of a parameter; its gradient lies in the whole as the parameter does.

    `DTensor.to_local` would do, but gives uneven parts gradients of another stride before torch 2.13.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.layout = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        return parameter.to_local()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        mesh, placements, shape, stride = ctx.layout
        part = gradients[0].contiguous()
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of what may be split."""
    return _Part.apply(parameter) if isinstance(parameter, DTensor) else parameter
