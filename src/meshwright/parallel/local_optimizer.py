"""An optimizer that updates this rank's own part of every parameter, as plain tensors.

AdamW and its kin change every element by itself, so the part that a rank holds is all that it needs: the update is the
same however a parameter is split, and goes without the cost of DTensors. The part is

- all that the rank holds (whole parameters, shards of zero=2 and 3, split matrices), or
- with zero=1 its own rows of that, which are gathered from all after the update,

and with offload=optimizer it lives in host memory, where the update then happens. `state_of` gives the state as
DTensors, which say where in the whole it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from meshwright.cuts import buckets_of, part
from meshwright.errors import ConfigError
from meshwright.models.parts import Box, box_of, local_of
from meshwright.optim.adamw import FusedAdamW
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.torch_releases import all_gather_into
from meshwright.torch_private import beside, is_shard, shard_within

BY_ELEMENT = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    FusedAdamW,
)
"""Optimizers that change every element by itself; moments in 8 bits share a scale with their neighbours on the rank."""

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass
class _Held:
    """A parameter and the part of it that this rank updates."""

    parameter: nn.Parameter
    part: nn.Parameter
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    rows_over: DeviceMesh | None
    """The ranks that update a part of what this rank holds each."""

    def as_whole(self, value: Tensor) -> Tensor:
        """State of the part, as a tensor that knows its place in the whole."""
        if self.mesh is None or value.shape != self.part.shape:
            return value
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(value, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


class LocalOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer that changes every element by itself; the state axes of `rows_over` share its state."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make: Make,
        *,
        rows_over: Mesh | None = None,
        on_host: bool = False,
    ) -> None:
        self._mesh = rows_over
        self.on_host = on_host
        self._held: dict[nn.Parameter, _Held] = {}
        own = [{**group, "params": [self._take(p) for p in group["params"]]} for group in groups]
        self.inner = make(own)
        kind = type(self.inner)
        # A class made of one of them may do more than it; whether it does, it must say itself.
        if kind not in BY_ELEMENT and not vars(kind).get("by_element", False):
            known = ", ".join(kind.__name__ for kind in BY_ELEMENT)
            raise ConfigError(
                f"{kind.__name__} is not known to change every element by itself, so that it cannot be sharded; "
                f"use zero=0, tp=1 and ep=1 without offload, or one of {known}; a class of your own that does has "
                "`by_element = True`"
            )
        super().__init__(own, self.inner.defaults)
        # One and the same as those of the optimizer that does the work, so that schedulers reach it.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._complete = True
        self._buckets = list(self._in_buckets())

    def _take(self, parameter: nn.Parameter) -> nn.Parameter:
        axis = self._rows_over(parameter)
        own = _own(parameter.detach(), axis)
        held = nn.Parameter(own.to("cpu", copy=True) if self.on_host else own)
        self._held[parameter] = _Held(parameter, held, *self._layout(parameter, axis), axis)
        return held

    def _rows_over(self, parameter: nn.Parameter) -> DeviceMesh | None:
        """The state axis of a parameter: experts that are dealt out have one of their own."""
        if self._mesh is None:
            return None
        if "ep" in _split_axes(parameter):
            assert self._mesh.experts is not None
            return self._mesh.experts.state
        return self._mesh.state

    def _layout(
        self, parameter: nn.Parameter, axis: DeviceMesh | None
    ) -> tuple[DeviceMesh | None, tuple[Placement, ...]]:
        """How the part lies in the whole."""
        if axis is None:
            if isinstance(parameter, DTensor):
                return parameter.device_mesh, tuple(parameter.placements)
            return None, ()
        split = _split_axes(parameter)
        if not split:
            return axis, (Shard(0),)
        assert isinstance(parameter, DTensor)
        before = [name for name, placement in split.items() if is_shard(placement) and placement.dim == 0]  # type: ignore[attr-defined]
        cut_before = prod(parameter.device_mesh[name].size() for name in before)
        mesh = beside(axis, *(parameter.device_mesh[name] for name in split))
        return mesh, (shard_within(0, cut_before), *split.values())

    def _in_buckets(self) -> Iterator[list[_Held]]:
        """What is gathered together after an update: neighbours on one axis, of one dtype."""
        for axis, dtype in dict.fromkeys((held.rows_over, held.parameter.dtype) for held in self._held.values()):
            held = [one for one in self._held.values() if (one.rows_over, one.parameter.dtype) == (axis, dtype)]
            if axis is not None and axis.size() > 1:
                sizes = [local_of(one.parameter).nbytes for one in held]
                yield from ([held[index] for index in bucket] for bucket in buckets_of(sizes))

    def part_of(self, parameter: nn.Parameter) -> tuple[nn.Parameter, Box]:
        """The part of a parameter that the inner optimizer updates, and where it lies in the whole."""
        held = self._held[parameter]
        return held.part, box_of(held.as_whole(held.part.detach()))

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter: its kinds, as tensors that know their place in the whole."""
        held = self._held[parameter]
        return {kind: held.as_whole(value) for kind, value in self.inner.state.get(held.part, {}).items()}

    def room_for(self, parameter: nn.Parameter, kind: str, per_element: bool, dtype: torch.dtype) -> Tensor:
        """Memory for one kind of a parameter's state, to be filled; it knows its place in the whole."""
        held = self._held[parameter]
        shape = held.part.shape if per_element else ()
        room = torch.empty(shape, dtype=dtype, device=held.part.device)
        self.inner.state[held.part][kind] = room
        return held.as_whole(room)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's parts; with rows, gather everybody's."""
        if closure is not None:
            raise ValueError("a split optimizer takes no closure; compute the loss and its gradients before step()")
        for parameter, held in self._held.items():
            own = _own(parameter, held.rows_over)
            if parameter.grad is None:
                held.part.grad = None
            elif self.on_host:
                held.part.data.copy_(own)
                held.part.grad = _own(parameter.grad, held.rows_over).to("cpu")
            else:
                held.part.data = own
                held.part.grad = _own(parameter.grad, held.rows_over)
        # As torch's fused optimizers have it: gradients are divided by the one; where the other is not zero all stays.
        for told in ("grad_scale", "found_inf"):
            setattr(self.inner, told, getattr(self, told, None))
        self.inner.step()
        for parameter, held in self._held.items():
            if self.on_host and held.part.grad is not None:
                _own(parameter, held.rows_over).copy_(held.part)
            held.part.grad = None
        for bucket in self._buckets:
            _gather(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or fill them with zeros where they lie."""
        for parameter in self._held:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parts, by number; a checkpoint by name, for any strategy, is the trainer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave on this rank under the same strategy."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made."""
        if getattr(self, "_complete", False):
            raise ValueError("a split optimizer takes all parameter groups when it is made")
        super().add_param_group(param_group)


def inner_of(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer that does the work."""
    return optimizer.inner if isinstance(optimizer, LocalOptimizer) else optimizer


def _rows(tensor: Tensor, axis: DeviceMesh, index: int) -> Tensor:
    """The rows of a rank along the axis; a view."""
    return tensor[part(tensor.shape[0], axis.size(), index)]


def _own(tensor: Tensor, rows_over: DeviceMesh | None) -> Tensor:
    """The part of a parameter or of its gradient that this rank updates; a view."""
    local = local_of(tensor)
    return local if rows_over is None else _rows(local, rows_over, rows_over.get_local_rank())


def _split_axes(parameter: Tensor) -> dict[str, Placement]:
    """The axes on which the model itself is split, and how they cut a parameter."""
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = zip(names, parameter.placements, strict=True)
    return {name: placement for name, placement in placements if name in ("ep", "tp")}


def _gather(bucket: Sequence[_Held]) -> None:
    """Every rank sends its rows of a bucket of parameters, padded to the size of the largest share."""
    axis = bucket[0].rows_over
    assert axis is not None
    size = axis.size()
    wholes = [local_of(held.parameter.data) for held in bucket]
    pieces = [[_rows(whole, axis, rank) for rank in range(size)] for whole in wholes]
    longest = max(sum(chunks[rank].numel() for chunks in pieces) for rank in range(size))
    mine = wholes[0].new_zeros(longest)
    own = torch.cat([chunks[axis.get_local_rank()].flatten() for chunks in pieces])
    mine[: own.numel()] = own
    everyone = mine.new_empty(size * longest)
    all_gather_into(everyone, mine, group=axis.get_group())
    for rank, share in enumerate(everyone.view(size, longest)):
        start = 0
        for chunks in pieces:
            rows = chunks[rank]
            rows.copy_(share[start : start + rows.numel()].view_as(rows))
            start += rows.numel()
