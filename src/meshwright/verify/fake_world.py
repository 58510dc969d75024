"""Any rank of any world in one process: a model is really split, on the meta device, over groups that send nothing.

So a layout for thousands of ranks can be built and looked at on a laptop before anybody rents them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.models.initialize import build_meta
from meshwright.models.parts import local_of
from meshwright.models.spec import ModelSpec
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.torch_releases import unchecked
from meshwright.strategy import Strategy
from meshwright.torch_private import FakeStore, forget_meshes


@dataclass(frozen=True)
class RankState:
    """What a rank of a world holds, in bytes."""

    parameters: int
    optimizer: int
    """AdamW's two moments of what the rank updates."""
    names: tuple[str, ...]


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a world that is not there; collectives give what they are given."""
    with unchecked():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            forget_meshes()


def build_rank(spec: ModelSpec, strategy: Strategy) -> Parallel:
    """A model under a strategy as this rank has it, on the meta device."""
    model = build_meta(spec)
    return parallelize(model, strategy, make_mesh(strategy, "cpu"), reduction="sum")


def state_of_rank(spec: ModelSpec, strategy: Strategy, rank: int) -> RankState:
    """What one rank of the strategy's world holds, counted on the split model itself."""
    with fake_rank(rank, strategy.world):
        parallel = build_rank(spec, strategy)
        optimizer = parallel.optimizer(torch.optim.AdamW)
        updated = [part for group in optimizer.param_groups for part in group["params"]]
        return RankState(
            parameters=sum(local_of(parameter).untyped_storage().nbytes() for parameter in parallel.parameters()),
            optimizer=2 * sum(local_of(part).nbytes for part in updated),
            names=tuple(name for name, _ in parallel.named_parameters()),
        )
