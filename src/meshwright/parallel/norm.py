"""The norm of gradients that are split in different ways, and clipping by it.

Each rank adds up the squares of what it holds; sums of parts that lie on different ranks are added over the axes on
which they are split, and over no others, so that what is held several times counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError

Where = tuple[DeviceMesh, tuple[int, ...]] | None


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    scale: float = 1.0,
    pipeline: dist.ProcessGroup | None = None,
    counted_elsewhere: Sequence[Tensor] = (),
) -> Tensor:
    """The norm of all gradients, the same on every rank; they are scaled down to `max_norm` where it is exceeded.

    Takes plain tensors and DTensors on any mix of meshes; a `max_norm` of 0 does not clip. Gradients of a loss that
    was multiplied by `scale` are divided by it first. Ranks of a `pipeline` hold different parameters each, except for
    those that are `counted_elsewhere`.
    """
    check_clip(max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = grad_norm(parameters, scale=scale, pipeline=pipeline, counted_elsewhere=counted_elsewhere)
    if max_norm or scale != 1.0:
        multiply_gradients_(parameters, clip_factor(norm, max_norm) / scale)
    return norm


def check_clip(max_norm: float) -> None:
    """Raise for a norm that nothing can be clipped to: a negative one would turn gradients around."""
    if not max_norm >= 0:
        raise ConfigError(f"gradients cannot be clipped to a norm of {max_norm}; use a number above 0, or 0 for none")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients of that norm are multiplied."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)


@torch.no_grad()
def multiply_gradients_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply this rank's parts of all gradients."""
    held = [_part(parameter.grad)[1] for parameter in parameters if parameter.grad is not None]
    held = [local for local in held if local.numel()]
    if held:
        torch._foreach_mul_(held, factor)


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor],
    *,
    scale: float = 1.0,
    pipeline: dist.ProcessGroup | None = None,
    counted_elsewhere: Sequence[Tensor] = (),
) -> Tensor:
    """The norm of all gradients, the same on every rank; see `clip_grad_norm_`."""
    parts: dict[Where, list[Tensor]] = {}
    again = []
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            where, local = _part(parameter.grad)
            if not any(parameter is other for other in counted_elsewhere):
                parts.setdefault(where, []).append(local)
            elif local.numel():
                again.append(local)
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for where, held in parts.items():
        total += _sum_of_squares(where, [local for local in held if local.numel()], device)
    # Counted elsewhere, but only this rank can tell whether its copy is a number: then this is zero, else it is not.
    total += 0.0 * _sum_of_squares(None, again, device)
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt() / scale


def _part(gradient: Tensor) -> tuple[Where, Tensor]:
    """Where a gradient is split, and this rank's part of it."""
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("a gradient is a sum that has not been taken; take it before the norm")
    split = (axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, tuple(split)), gradient.to_local()


def _sum_of_squares(where: Where, held: list[Tensor], device: torch.device) -> Tensor:
    square = torch.zeros((), dtype=torch.float64, device=device)
    if held:
        # Norms of narrow gradients are taken in float32.
        wide = torch.float32 if held[0].element_size() < 4 else held[0].dtype
        square += torch.stack(torch._foreach_norm(held, dtype=wide)).to(device, torch.float64).square().sum()
    if where is not None:
        mesh, axes = where
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
    return square
