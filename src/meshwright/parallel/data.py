"""Data parallel: every rank holds the whole model and works on its share of the batch; gradients are summed.

Summed, not averaged: the loss is already divided by the global count of tokens, so the sum over ranks is the gradient
of the whole batch, however it is split.
"""

# No `from __future__ import annotations` here: torch reads the communication hook's annotations as types.
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.mixture import mixtures
from meshwright.parallel.torch_releases import BUFFERS_STAY_LOCAL, GradBucket
from meshwright.parallel.world import World


def replicate(model: nn.Module, world: World) -> nn.Module:
    """The model with its gradients summed over all ranks, in buckets, while the backward pass runs."""
    if world.size == 1:
        return model
    for mixture in mixtures(model):
        mixture.data_group = world.group
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY_LOCAL)
    replica.register_comm_hook(None, _sum)
    return replica


def _sum(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def synchronise(replica: nn.Module, now: bool) -> AbstractContextManager[None]:
    """The context of a forward and backward pass: gradients travel now, or are kept for a later pass to take along."""
    if now or not isinstance(replica, DistributedDataParallel):
        return nullcontext()
    return replica.no_sync()
