"""What a module sees when it reads its own parameters in a forward pass, and what happens around that pass.

Models are written for one device. A split model stores its parameters as DTensors, whole in name and shape, while its
code must see this rank's part, in the dtype to compute in. So for the time of a module's forward pass an attribute
stands before each such parameter; at all other times, and for everybody who asks for `parameters()`, there is what is
stored. Modules with `reads_itself`, those of our own decoder, do without: they ask for what they are to see (`seen`),
and compute in the dtype of their input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.torch_private import parameters_of

Transform = Callable[[Tensor], Tensor]
Forward = Callable[..., Tensor]


def read_through(module: nn.Module, name: str, *transforms: Transform) -> None:
    """From now on, the module's forward pass sees these functions of what it saw of that parameter before."""
    if not is_read(module):
        module.__dict__["_reads"] = {}
        _take_forward(module)
    reads: dict[str, tuple[Transform, ...]] = module.__dict__["_reads"]
    reads[name] = (*reads.get(name, ()), *transforms)


def is_read(module: nn.Module) -> bool:
    """Whether the module sees functions of its parameters."""
    return hasattr(module, "_reads")


def around_forward(module: nn.Module, wrapper: Callable[..., Any], *, innermost: bool = False) -> None:
    """From now on, the module's forward pass is `wrapper(forward, *inputs)`, outside of all wrappers or inside.

    What a module sees of its parameters is shown inside of all wrappers; they ask `seen` themselves.
    """
    _take_forward(module)
    others = module.__dict__["_wrappers"]
    module.__dict__["_wrappers"] = (wrapper, *others) if innermost else (*others, wrapper)


def _take_forward(module: nn.Module) -> None:
    """Let the module's forward pass be one with wrappers."""
    if "_wrappers" in module.__dict__:
        return
    module.__dict__["_wrappers"] = ()
    if "forward" in module.__dict__:
        # Its own, not that of its class.
        module.forward = partial(_call, module, module.forward)
        return
    # By its class: a compiler takes an attribute of its own, or a hook's number, for code unlike that of other layers.
    module.__class__ = _wrapped(type(module))  # type: ignore[arg-type]


@cache
def _wrapped(kind: type[nn.Module]) -> type[nn.Module]:
    """The same kind of module with wrappers around its forward pass."""
    of_kind = {"forward": _with_wrappers(kind, None), "__module__": kind.__module__}  # type: ignore[arg-type]
    return type(kind.__name__, (kind,), of_kind)


@cache
def _with_wrappers(kind: type[nn.Module], count: int | None) -> Forward:
    """The forward pass of that kind of module inside of its first wrappers, or of all."""

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        return _call(self, partial(kind.forward, self), *inputs, _count=count, **options)

    return forward


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was written; with wrappers, its class is one that was made for them."""
    kind = type(module)
    made = "_wrappers" in module.__dict__ and "forward" not in module.__dict__
    return kind.__base__ if made else kind  # type: ignore[return-value]


def forward_so_far(module: nn.Module) -> Forward:
    """The forward pass as it is now, as a function of the module, whatever is put around it later; modules of a kind
    with as many wrappers have the same function."""
    count = len(module.__dict__.get("_wrappers", ()))
    own = module.__dict__.get("forward")
    if own is not None:
        return partial(_own_so_far, own, count if "_wrappers" in module.__dict__ else None)
    kind = kind_of(module)
    return _with_wrappers(kind, count) if "_wrappers" in module.__dict__ else kind.forward  # type: ignore[arg-type]


def _own_so_far(own: Forward, count: int | None, module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return own(*inputs, **options) if count is None else own(*inputs, _count=count, **options)


def _call(module: Any, forward: Callable[..., Any], *inputs: Any, _count: int | None = None, **options: Any) -> Any:
    if is_read(module) and not getattr(module, "reads_itself", False):
        forward = partial(_show, module, forward)
    for wrapper in module._wrappers[:_count]:
        forward = partial(wrapper, forward)
    return forward(*inputs, **options)


def _show(module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """A forward pass that sees what it should."""
    try:
        for name in module._reads:
            # Around nn.Module's own rule that a parameter's name takes nothing else.
            object.__setattr__(module, name, seen(module, name))
        return forward(*inputs, **options)
    finally:
        for name in module._reads:
            module.__dict__.pop(name, None)


def seen(module: nn.Module, name: str) -> Tensor | None:
    """What the module's forward pass sees of a parameter."""
    value: Tensor | None = parameters_of(module)[name]
    if value is not None:
        for transform in getattr(module, "_reads", {}).get(name, ()):
            value = transform(value)
    return value


def seen_in(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor | None:
    """The same in a dtype to compute in."""
    value = seen(module, name)
    return None if value is None else value.to(dtype)


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
