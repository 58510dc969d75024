"""Data parallel: every rank works on its share of the batch, and gradients are summed or averaged.

- zero=0, 1: each rank holds all parameters and gradients, which travel in buckets while the backward pass runs: by DDP,
  or, where matrices are split too, by FSDP2's `replicate`. They travel once a step, with the last micro-step. With
  zero=1 the optimizer state lives in shards (`local_optimizer.py`).
- zero=2, 3: optimizer state and gradients live in shards; with 3 parameters do too, gathered block by block when they
  are used (FSDP2). Gradients are scattered after every micro-step, so that they never exist whole; with `replicate`
  the shards exist several times, and are summed over the copies once a step. With 2 parameters stay gathered from the
  first forward pass of a step to its last backward pass.
"""

# No `from __future__ import annotations` here: torch reads the communication hook's annotations as types.
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.algorithms import Nodes
from meshwright.comm.all_reduce import all_reduce, machines_of
from meshwright.comm.travel import BACKEND, Travel
from meshwright.models.mixture import mixtures
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import Precision
from meshwright.parallel.torch_releases import BUFFERS_STAY_LOCAL, GradBucket, group_for_ddp, group_of
from meshwright.strategy import Strategy
from meshwright.torch_private import beside, reduce_gradients
from meshwright.torch_private import replicate as replicate_composable

Reduction = Literal["mean", "sum"]
Split = Callable[[Any, bool], None]
"""Splits a unit of modules, given whether it is the root."""


def apply(
    model: nn.Module,
    units: Sequence[list[nn.Module]],
    strategy: Strategy,
    mesh: Mesh,
    precision: Precision,
    reduction: Reduction,
) -> None:
    """Shard or replicate unit by unit; what is outside of the units goes with the root."""
    if mesh.loss.size() == 1 or uses_ddp(strategy):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param if precision.mixed else None,
        reduce_dtype=precision.reduce if precision.mixed or precision.reduce != precision.stored else None,
        cast_forward_inputs=False,
    )
    held_apart = _wrap_experts(model, strategy, mesh, policy)
    over = beside(mesh["replicate"], mesh.state) if strategy.replicate > 1 else mesh.state
    split = _replicating(mesh.loss, policy) if strategy.zero < 2 else _sharding(strategy, over, policy)
    for unit in units:
        left = [module for module in unit if module not in held_apart]
        if left:
            split(left if len(left) > 1 else left[0], False)
    split(model, True)
    if reduction == "sum":
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(1.0)
            # A divided sum is an operation of its own that gloo does not have; a plain sum is what is wanted anyway.
            module.set_force_sum_reduction_for_comms(True)


def _wrap_experts(model: nn.Module, strategy: Strategy, mesh: Mesh, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Make units of their own of experts that ranks have dealt out: only ranks with the same ones add gradients up."""
    places = mesh.experts
    if places is None:
        return []
    over = beside(places["expert_replicate"], places.state) if strategy.expert_copies[0] > 1 else places.state
    split = _replicating(places.copies, policy) if strategy.zero < 2 else _sharding(strategy, over, policy)
    found: list[nn.Module] = [mixture.experts for mixture in mixtures(model)]
    for experts in found:
        split(experts, False)
    return found


def _replicating(over: DeviceMesh, policy: MixedPrecisionPolicy) -> Split:
    def replicate(unit: Any, is_root: bool) -> None:
        replicate_composable(unit, mesh=over, mp_policy=policy)

    return replicate


def _sharding(strategy: Strategy, over: DeviceMesh, policy: MixedPrecisionPolicy) -> Split:
    offload = OffloadPolicy()
    if strategy.host_states == "parameters":
        offload = CPUOffloadPolicy(pin_memory=over.device_type == "cuda")

    def shard(unit: Any, is_root: bool) -> None:
        # The root's parameters are needed last and first again: they stay gathered in between.
        reshard_after_forward = strategy.zero == 3 and not is_root
        fully_shard(
            unit, mesh=over, reshard_after_forward=reshard_after_forward, mp_policy=policy, offload_policy=offload
        )

    return shard


def wrap_ddp(
    model: nn.Module, strategy: Strategy, mesh: Mesh, precision: Precision, reduction: Reduction, travel: Travel
) -> nn.Module:
    """The module to call for a training step: where parameters are whole, one that reduces their gradients."""
    if mesh.loss.size() == 1 or not uses_ddp(strategy):
        return model
    group = group_for_ddp(mesh.loss.get_group())
    replica = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=travel.bucket_mb,
        **BUFFERS_STAY_LOCAL,
    )
    scale = 1.0 if reduction == "sum" else 1.0 / mesh.loss.size()
    if travel.all_reduce != BACKEND:
        # A group of its own: its messages are not counted among the collectives of the other.
        own = group_of(dist.get_process_group_ranks(group))
        how = _Algorithm(own, precision.reduce, scale, travel.all_reduce, machines_of(own))
        replica.register_comm_hook(how, _reduce_by_messages)
    elif reduction != "mean" or precision.reduce != precision.stored:
        replica.register_comm_hook(_Reduce(group, precision.reduce, scale), _reduce)
    return replica


def uses_ddp(strategy: Strategy) -> bool:
    """Whether DistributedDataParallel does it: every rank holds all parameters, whole."""
    return strategy.zero < 2 and strategy.tp == strategy.pp == strategy.ep == 1


@dataclass
class _Reduce:
    """How a bucket of gradients is reduced: by whom, in which dtype, divided by how many."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    scale: float

    def outgoing(self, bucket: GradBucket) -> Tensor:
        """What is to be summed."""
        sent = bucket.buffer().to(self.dtype)
        return sent if self.scale == 1.0 else sent.mul_(self.scale)


def _reduce(how: _Reduce, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    held, sent = bucket.buffer(), how.outgoing(bucket)
    work = dist.all_reduce(sent, group=how.group, async_op=True)
    return work.get_future().then(lambda future: held.copy_(future.value()[0]))


@dataclass
class _Algorithm(_Reduce):
    """The same by messages from rank to rank."""

    name: str
    nodes: Nodes


def _reduce_by_messages(how: _Algorithm, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    held, sent = bucket.buffer(), how.outgoing(bucket)
    all_reduce(sent, how.name, how.group, how.nodes)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(held.copy_(sent))
    return done


def synchronise(model: nn.Module, replica: nn.Module, zero: int, now: bool) -> AbstractContextManager[None]:
    """The context of a forward and backward pass: the last one of a step (now), or one before it."""
    if isinstance(replica, DistributedDataParallel):
        return nullcontext() if now else replica.no_sync()
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(now)
        if zero < 2:
            model.set_requires_gradient_sync(now)
        else:
            model.set_requires_all_reduce(now)
        if zero == 2:
            model.set_reshard_after_backward(now)
    return nullcontext()


def accumulate(model: nn.Module, zero: int) -> None:
    """From now on, let gradients of whole parameters gather on this rank, until `reduce`."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(zero == 3)


def reduce(model: nn.Module) -> None:
    """Reduce what has gathered."""
    if isinstance(model, FSDPModule):
        reduce_gradients(model)


def reshard(model: nn.Module) -> None:
    """Put gathered weights back into shards: a forward pass without a backward one leaves them gathered."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered and reduced together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
