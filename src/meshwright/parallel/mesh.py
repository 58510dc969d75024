"""The mesh: from a strategy and the order of ranks to device meshes with named axes. Passed around, never global.

Axes, outermost first: pp, replicate, shard, cp, tp. Ranks that differ only in the last axis are neighbours, so that
the heaviest traffic stays on the fastest links. Axes made of others:

    data    replicate x shard: ranks that work on different samples
    loss    replicate x shard x cp: ranks that hold different tokens of one step
    ep      the innermost ranks of `data` that split the experts among them; its own mesh, see `expert_mesh`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategy import Strategy
from meshwright.torch_private import flatten

AXES = ("pp", "replicate", "shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The axes of a strategy as ranks, and the axes made of them."""

    axes: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """One or several of the axes."""
        return self.axes[names]


def make_mesh(strategy: Strategy, device_type: str, placement: Sequence[int] | None = None) -> Mesh:
    """The mesh of a strategy; `placement` lists the ranks in mesh order where that is not 0, 1, 2, ..."""
    order = list(range(strategy.world) if placement is None else placement)
    if sorted(order) != list(range(strategy.world)):
        raise ValueError(f"placement {order} is not an order of the {strategy.world} ranks")
    ranks = torch.tensor(order).view([getattr(strategy, axis) for axis in AXES])
    for dim, axis in enumerate(AXES):
        # Process groups number their members in ascending order; a mesh that did not would disagree with them.
        if bool((ranks.diff(dim=dim) < 0).any()):
            raise ValueError(f"placement {order} has ranks in descending order along {axis}; list them ascending")
    axes = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    data = flatten(axes, ("replicate", "shard"), "data")
    return Mesh(axes, data, flatten(axes, ("replicate", "shard", "cp"), "loss"))


def expert_mesh(mesh: Mesh, ep: int) -> DeviceMesh:
    """The mesh seen by experts, axes pp, expert_data, ep, cp, tp: `ep` splits them, `expert_data` has their copies."""
    ranks = mesh.axes.mesh.flatten(1, 2)
    return DeviceMesh(
        mesh.axes.device_type,
        ranks.unflatten(1, (ranks.shape[1] // ep, ep)),
        mesh_dim_names=("pp", "expert_data", "ep", "cp", "tp"),
    )
