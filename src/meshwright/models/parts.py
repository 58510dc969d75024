"""A whole tensor and this rank's part of it: plain tensors are whole, DTensors are split over a mesh.

The axes of a mesh cut one after the other, the last one first: what FSDP shards was cut by tensor parallel before. Each
cut follows the rule of `cuts.py`, however uneven it comes out; PyTorch's own arithmetic of such placements is right for
even parts only.

A dimension may be packed: several lengths behind one another, such as gates and ups of experts, each of which is cut. A
rank's part of it lies in several places; `unpacked` is the same tensor with that dimension seen as two.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from meshwright.cuts import longest_part, part, part_length
from meshwright.torch_private import all_gather, is_shard


class Box(NamedTuple):
    """The part of a tensor that this rank holds: the values, and where they lie in the whole."""

    local: Tensor
    offset: tuple[int, ...]
    whole_shape: tuple[int, ...]


class _Cut(NamedTuple):
    """What one axis of a mesh does to a dimension that the axes after it have left."""

    axis: int
    dim: int
    length: int
    parts: int
    mine: int


def local_of(tensor: Tensor) -> Tensor:
    """The values that this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor) -> Box:
    """This rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return Box(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    if packs_of(tensor) is not None:
        raise ValueError("a part of a packed dimension lies in several places")
    offset = [0] * tensor.ndim
    for cut in _cuts(tensor):
        offset[cut.dim] += part(cut.length, cut.parts, cut.mine).start
    return Box(tensor.to_local(), tuple(offset), tuple(tensor.shape))


def _cuts(tensor: DTensor) -> Iterator[_Cut]:
    """What the axes do, the first cut first."""
    mesh, lengths = tensor.device_mesh, list(tensor.shape)
    place = mesh.get_coordinate()
    assert place is not None
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if is_shard(placement):
            dim: int = placement.dim  # type: ignore[attr-defined]
            cut = _Cut(axis, dim, lengths[dim], mesh.size(axis), place[axis])
            lengths[dim] = part_length(cut.length, cut.parts, cut.mine)
            yield cut
        elif placement.is_partial():
            raise ValueError("a tensor that is a sum still to be taken has no parts")


def packs_of(tensor: Tensor) -> tuple[int, int] | None:
    """The packed dimension of a tensor that is split, and how many lengths lie behind one another in it."""
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            # The same kind of placement says that later axes have cut the dimension before.
            later = zip(range(tensor.device_mesh.ndim), tensor.placements, strict=True)
            dim = getattr(placement, "dim", None)
            before = (tensor.device_mesh.size(n) for n, p in later if n > axis and getattr(p, "dim", None) == dim)
            if (packs := getattr(placement, "split_factor", 1) // prod(before)) > 1:
                return placement.dim, packs  # type: ignore[attr-defined]
    return None


def unpacked(tensor: Tensor) -> Tensor:
    """A tensor with its packed dimension, if it has one, seen as two: which length, and where in it."""
    found = packs_of(tensor)
    if found is None:
        return tensor
    assert isinstance(tensor, DTensor)
    dim, packs = found
    local = tensor.to_local().unflatten(dim, (packs, -1))
    shape = torch.Size((*tensor.shape[:dim], packs, tensor.shape[dim] // packs, *tensor.shape[dim + 1 :]))
    placements: list[Placement] = []
    for placement in tensor.placements:
        at = getattr(placement, "dim", -1)
        placements.append(placement if at < dim else Shard(at + 1))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is split, all ranks must ask for it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    if (packed := packs_of(tensor)) is not None:
        return whole(unpacked(tensor)).flatten(packed[0], packed[0] + 1)
    value = tensor.to_local()
    for cut in reversed(list(_cuts(tensor))):
        if cut.parts > 1:
            value = _join(value.movedim(cut.dim, 0), cut, tensor).movedim(0, cut.dim)
    return value


def _join(rows: Tensor, cut: _Cut, tensor: DTensor) -> Tensor:
    """The parts of all ranks along an axis after one another; they travel padded to the longest one."""
    longest = longest_part(cut.length, cut.parts)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = all_gather(padded, 0, tensor.device_mesh.get_group(cut.axis)).view(cut.parts, *padded.shape)
    return torch.cat([gathered[index, : part_length(cut.length, cut.parts, index)] for index in range(cut.parts)])


def part_like(value: Tensor, target: Tensor) -> Tensor:
    """A whole value split as the target is, without communication: every rank has the value."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    local, offset, _ = box_of(target)
    held = value[tuple(slice(first, first + length) for first, length in zip(offset, local.shape, strict=True))]
    return DTensor.from_local(
        held.contiguous(),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
