"""ZeRO stage 1: every rank holds all parameters and gradients, but optimizer state for its own rows only.

After the gradients are summed, each rank updates its rows in place, and the updated rows are gathered from all. Rows
are dim-0 chunks, held as DTensors, so that their state is sharded as under stages 2 and 3 and reshards like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

GATHER_BYTES = 25 << 20
"""How many bytes of parameters are gathered at once."""


class ShardedOptimizer:
    """An optimizer whose state is sharded over one axis of a mesh."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mesh: DeviceMesh,
    ) -> None:
        self._mesh = mesh
        self._rows: dict[nn.Parameter, nn.Parameter] = {}
        own = [{**group, "params": [self._take(p) for p in group["params"]]} for group in groups]
        self._inner = make(own)
        self._buckets = list(_buckets(list(self._rows)))

    def _take(self, parameter: nn.Parameter) -> nn.Parameter:
        local = _chunk(parameter.data, self._mesh)
        shape, stride = parameter.shape, parameter.stride()
        rows = DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        self._rows[parameter] = nn.Parameter(rows)
        return self._rows[parameter]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that does the work, with their learning rates."""
        return self._inner.param_groups

    @property
    def state(self) -> dict[Any, dict[str, Tensor]]:
        """The state of every parameter's rows."""
        return self._inner.state

    def rows_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The rows of a parameter that this rank updates, under which its state is kept."""
        return self._rows[parameter]

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's rows, then gather everybody's."""
        for parameter, rows in self._rows.items():
            if parameter.grad is not None:
                local = _chunk(parameter.grad, self._mesh)
                shape, stride = parameter.shape, parameter.stride()
                rows.grad = DTensor.from_local(
                    local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )
        self._inner.step()
        for rows in self._rows.values():
            rows.grad = None
        for bucket in self._buckets:
            self._gather(bucket)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._rows:
            parameter.grad = None

    def _gather(self, bucket: Sequence[nn.Parameter]) -> None:
        """Every rank sends its rows of a bucket of parameters, padded to the size of the largest share."""
        size = self._mesh.size()
        lengths = [[chunk.numel() for chunk in _chunks(p.data, size)] for p in bucket]
        longest = max(sum(length[rank] for length in lengths) for rank in range(size))
        mine = bucket[0].new_zeros(longest)
        own = torch.cat([_chunk(p.data, self._mesh).flatten() for p in bucket])
        mine[: own.numel()] = own
        everyone = mine.new_empty(size * longest)
        dist.all_gather_into_tensor(everyone, mine, group=self._mesh.get_group())
        for rank, share in enumerate(everyone.view(size, longest)):
            start = 0
            for parameter in bucket:
                rows = _chunks(parameter.data, size)[rank]
                rows.copy_(share[start : start + rows.numel()].view_as(rows))
                start += rows.numel()


def _chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """Dim-0 chunks as DTensor cuts them: as many rows each but for the last ones, which may have none."""
    chunks = list(tensor.chunk(size))
    return chunks + [tensor[:0]] * (size - len(chunks))


def _chunk(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _chunks(tensor, mesh.size())[mesh.get_local_rank()]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.nbytes for p in bucket) + parameter.nbytes > GATHER_BYTES
        if bucket and (full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
