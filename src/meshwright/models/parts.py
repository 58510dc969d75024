"""A whole tensor and this rank's part of it: plain tensors are whole, DTensors are split over a mesh."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshwright.torch_private import local_shape_and_offset


class Box(NamedTuple):
    """The part of a tensor that this rank holds: the values, and where they lie in the whole."""

    local: Tensor
    offset: tuple[int, ...]
    whole_shape: tuple[int, ...]


def box_of(tensor: Tensor) -> Box:
    """This rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return Box(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    _, offset = local_shape_and_offset(tensor)
    return Box(tensor.to_local(), offset, tuple(tensor.shape))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is split, all ranks must ask for it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Axis by axis, the outermost first: what it cuts was cut by the inner ones before.
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def part_like(value: Tensor, target: Tensor) -> Tensor:
    """A whole value split as the target is, without communication: every rank has the value."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    size, offset = local_shape_and_offset(target)
    part = value[tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))]
    return DTensor.from_local(
        part.contiguous(),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
