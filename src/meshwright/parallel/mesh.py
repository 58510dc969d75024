"""The mesh: from a strategy and the order of ranks to device meshes with named axes. Passed around, never global.

Axes, outermost first: pp, replicate, shard, cp, tp. Unless a placement says otherwise (`axis_order`), ranks that differ
only in the last axis are neighbours, so that the heaviest traffic stays on the fastest links. Axes made of others:

    data    replicate x shard: ranks that work on different samples
    loss    replicate x shard x cp: ranks that hold different tokens of one step
    state   shard x cp: ranks that share the state of one copy of the model

Experts that are split over data-parallel ranks are seen on a mesh of their own, `experts`: pp, expert_replicate, ep,
expert_shard, cp, tp. There `ep`, the innermost ranks of `data`, splits them; the other axes hold copies, with

    copies  expert_replicate x expert_shard x cp: ranks that hold the same experts
    state   expert_shard x cp: those of them that share one copy's state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.axis_order import AXES
from meshwright.strategy import Strategy
from meshwright.torch_private import flatten

_MADE = {"data": ("replicate", "shard"), "loss": ("replicate", "shard", "cp"), "state": ("shard", "cp")}


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks as experts see them: the axes, and those made of them."""

    axes: DeviceMesh
    copies: DeviceMesh
    state: DeviceMesh

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """One or several of the axes."""
        return self.axes[names]


@dataclass(frozen=True)
class Mesh:
    """The axes of a strategy as ranks, and the axes made of them."""

    axes: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh
    state: DeviceMesh
    experts: ExpertMesh | None = None

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """One or several of the axes."""
        return self.axes[names]


def make_mesh(strategy: Strategy, device_type: str, placement: Sequence[int] | None = None) -> Mesh:
    """The mesh of a strategy; `placement` lists the ranks in mesh order where that is not 0, 1, 2, ..."""
    order = list(range(strategy.world) if placement is None else placement)
    if sorted(order) != list(range(strategy.world)):
        raise ValueError(f"placement {order} is not an order of the {strategy.world} ranks")
    ranks = torch.tensor(order).view([getattr(strategy, axis) for axis in AXES])
    for name, parts in {**{axis: (axis,) for axis in AXES}, **_MADE}.items():
        # Process groups number their members in ascending order; a mesh that did not would disagree with them.
        first = AXES.index(parts[0])
        if bool((ranks.flatten(first, first + len(parts) - 1).diff(dim=first) < 0).any()):
            raise ValueError(f"placement {order} has ranks in descending order along {name}; list them ascending")
    axes = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    return Mesh(
        axes,
        **{name: flatten(axes, parts, name) for name, parts in _MADE.items()},
        experts=_experts(strategy, axes) if strategy.ep > 1 else None,
    )


def _experts(strategy: Strategy, axes: DeviceMesh) -> ExpertMesh:
    copies, shards = strategy.expert_copies
    # As (pp, expert_replicate, expert_shard, ep, cp, tp), then with the shards beside cp, with which they are one axis.
    ranks = axes.mesh.flatten(1, 2).unflatten(1, (copies, shards, strategy.ep)).transpose(2, 3).contiguous()
    names = ("pp", "expert_replicate", "ep", "expert_shard", "cp", "tp")
    found = DeviceMesh(axes.device_type, ranks, mesh_dim_names=names)
    return ExpertMesh(
        found,
        copies=flatten(found, ("expert_replicate", "expert_shard", "cp"), "copies"),
        state=flatten(found, ("expert_shard", "cp"), "expert_state"),
    )


def axes_of(mesh: Mesh | None) -> dict[str, str]:
    """Names of the groups that this rank is in, by their ranks; of several names the most telling one."""
    if mesh is None:
        return {}
    meshes = {"world": None, "loss": mesh.loss, "state": mesh.state, "data": mesh.data}
    if mesh.experts is not None:
        meshes |= {"copies of experts": mesh.experts.copies, "ep": mesh.experts["ep"]}
    meshes |= {axis: mesh[axis] for axis in ("replicate", "shard", "pp", "cp", "tp")}
    found = {}
    for name, one in meshes.items():
        ranks = dist.get_process_group_ranks(None if one is None else one.get_group())
        if len(ranks) > 1:
            found[" ".join(map(str, ranks))] = name
    return found
