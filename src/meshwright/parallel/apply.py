"""One `apply` for every model: lays a strategy over a model that was written for one device."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures
from meshwright.parallel import data
from meshwright.strategy import Strategy


def apply(model: Decoder, strategy: Strategy, mesh: DeviceMesh | None) -> None:
    """Split the model in place as the strategy says; on the meta device too."""
    if mesh is None:
        return
    for mixture in mixtures(model):
        mixture.data_group = dist.group.WORLD
    data.apply(model, strategy, mesh)
