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

from torch import Tensor, nn

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
