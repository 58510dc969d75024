"""Data parallel: every rank works on its share of the batch, and gradients are summed.

Summed, not averaged: the loss is already divided by the global count of tokens, so the sum over ranks is the gradient
of the whole batch, however it is split.

- zero=0, 1: each rank holds all parameters and gradients, which travel in buckets while the backward pass runs (DDP);
  with 1 the optimizer state lives in shards (`zero1.py`).
- zero=2, 3: optimizer state and gradients live in shards; with 3 parameters do too, gathered block by block when they
  are used (FSDP2). With `replicate` the shards exist several times, and gradients are summed over the copies as well.
"""

# No `from __future__ import annotations` here: torch reads the communication hook's annotations as types.
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.decoder import Decoder
from meshwright.parallel.torch_releases import BUFFERS_STAY_LOCAL, GradBucket
from meshwright.strategy import Strategy


def replicate(model: Decoder, strategy: Strategy, mesh: DeviceMesh | None) -> nn.Module:
    """The module to call for a training step: where parameters are whole, one that sums their gradients."""
    if mesh is None or strategy.zero >= 2:
        return model
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY_LOCAL)
    replica.register_comm_hook(None, _sum)
    return replica


def _sum(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def apply(model: Decoder, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Shard block by block; what is outside of the blocks goes with the root, so that tied weights stay one."""
    if strategy.zero < 2:
        return
    over = mesh if strategy.replicate > 1 else mesh["shard"]
    for block in model.model.layers.values():
        fully_shard(block, mesh=over, reshard_after_forward=strategy.zero == 3)
    fully_shard(model, mesh=over, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A divided sum is an operation of its own that gloo does not have; a plain sum is what is wanted anyway.
            module.set_force_sum_reduction_for_comms(True)


def synchronise(replica: nn.Module, now: bool) -> AbstractContextManager[None]:
    """The context of a forward and backward pass: gradients travel now, or are kept for a later pass to take along."""
    if isinstance(replica, DistributedDataParallel):
        return nullcontext() if now else replica.no_sync()
    if isinstance(replica, FSDPModule):
        replica.set_requires_gradient_sync(now)
        replica.set_is_last_backward(now)
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Put gathered weights back into shards: a forward pass without a backward one leaves them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
