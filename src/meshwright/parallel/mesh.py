"""The mesh: from a strategy and the order of ranks to a DeviceMesh with named axes. Passed around, never global.

Axes, outermost first: replicate, shard. Ranks that differ only in the last axis are neighbours, so that the heaviest
traffic stays on the fastest links.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategy import Strategy

AXES = ("replicate", "shard")


def make_mesh(strategy: Strategy, device_type: str, placement: Sequence[int] | None = None) -> DeviceMesh:
    """The mesh of a strategy; `placement` lists the ranks in mesh order where that is not 0, 1, 2, ..."""
    order = list(range(strategy.world) if placement is None else placement)
    if sorted(order) != list(range(strategy.world)):
        raise ValueError(f"placement {order} is not an order of the {strategy.world} ranks")
    shape = [getattr(strategy, axis) for axis in AXES]
    return DeviceMesh(device_type, torch.tensor(order).view(shape), mesh_dim_names=AXES)
