"""What a module sees when it reads its own parameters, and what happens around its forward pass.

Models are written for one device. A split model stores its parameters as DTensors, whole in name and shape, while its
code must see this rank's part, in the dtype to compute in. Between the two stands a property: `module.weight` inside
the module's code gives what was arranged here, and `parameters()` gives what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from meshwright.torch_private import parameters_of

Transform = Callable[[Tensor], Tensor]


def read_through(module: nn.Module, name: str, *transforms: Transform) -> None:
    """From now on, reading that parameter gives these functions of what it gave before."""
    reads: dict[str, tuple[Transform, ...]] = module.__dict__.setdefault("_reads", {})
    if name not in reads:
        module.__class__ = _readable(type(module), name)  # type: ignore[arg-type]
    reads[name] = (*reads.get(name, ()), *transforms)


def around_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """From now on, the module's forward pass is `wrapper(forward, *inputs)`."""
    module.forward = partial(wrapper, module.forward)


@cache
def _readable(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """The class with a property in place of a parameter."""

    def read(self: nn.Module) -> Tensor | None:
        value: Tensor | None = parameters_of(self)[name]
        if value is not None:
            for transform in self.__dict__["_reads"][name]:
                value = transform(value)
        return value

    return type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})
