"""Records the collectives that run: kind, group and bytes, as the dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.estimate.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic
from meshwright.parallel.mesh import Mesh
from meshwright.torch_private import resolve_group

_KINDS = {
    "c10d::allreduce_": ALL_REDUCE,
    "c10d::_allgather_base_": ALL_GATHER,
    "c10d::_reduce_scatter_base_": REDUCE_SCATTER,
    "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": REDUCE_SCATTER,
}
_OTHERS = {
    "c10d::allgather_": ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": ALL_GATHER,
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
"""Those that closed forms do not know."""
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


@dataclass(frozen=True)
class Collective:
    """One collective, as the dispatcher sees it."""

    kind: str
    ranks: str
    """Those that take part."""
    bytes: int
    """The largest of what goes in and what comes out."""
    dtype: torch.dtype | None = None


def collective_of(operation: Any, inputs: Any, result: Any) -> Collective | None:
    """The collective that an operation is; None if it is none."""
    name = operation.name().split(".")[0]
    kind = _KINDS.get(name) or _OTHERS.get(name)
    if kind is not None:
        tensors = _tensors([inputs, result])
        return Collective(kind, _ranks(_group(inputs)), max(one.nbytes for one in tensors), tensors[0].dtype)
    return Collective(name, "", 0) if "c10d" in name and not name.endswith(_SILENT) else None


class RecordCollectives(TorchDispatchMode):
    """Counts collectives while it is entered; in place of an axis there are the ranks that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic(Counter(), Counter())

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = operation(*inputs, **(options or {}))
        name = operation.name().split(".")[0]
        if name in _KINDS:
            self.traffic.add(_KINDS[name], _ranks(_group(inputs)), _bytes([inputs, result]))
        elif "c10d" in name and not name.endswith(_SILENT):
            self.traffic.add(name, "", 0)
        return result


def by_ranks(traffic: Traffic, mesh: Mesh) -> Traffic:
    """Traffic with the ranks in place of the axes, as this rank sees them."""
    groups = {axis: mesh[axis].get_group() for axis in ("tp", "shard", "replicate")}
    groups |= {"data": mesh.data.get_group(), "loss": mesh.loss.get_group()}
    ranks = {axis: _ranks(group) for axis, group in groups.items()} | {"world": _ranks(None)}
    named = Traffic(Counter(), Counter())
    for (kind, axis), count in traffic.counts.items():
        named.counts[kind, ranks[axis]] += count
        named.bytes[kind, ranks[axis]] += traffic.bytes[kind, axis]
    return named


def _ranks(group: dist.ProcessGroup | None) -> str:
    return " ".join(map(str, dist.get_process_group_ranks(group)))


def _group(inputs: Any) -> dist.ProcessGroup:
    """The process group among the inputs of a collective: an object of its own, or a name."""
    for value in inputs:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return resolve_group(next(value for value in reversed(inputs) if isinstance(value, str)))


def _bytes(values: Any) -> int:
    """The largest of what goes in and what comes out, which is the whole tensor."""
    return max(tensor.nbytes for tensor in _tensors(values))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
