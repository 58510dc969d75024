"""Data parallel: every rank works on its share of the batch, and gradients are summed or averaged.

- zero=0, 1: each rank holds all parameters and gradients, which travel in buckets while the backward pass runs: by DDP,
  or, where matrices are split too, by FSDP2's `replicate`. They travel once a step, with the last micro-step. With
  zero=1 the optimizer state lives in shards (`local_optimizer.py`).
- zero=2, 3: optimizer state and gradients live in shards; with 3 parameters do too, gathered block by block when they
  are used (FSDP2). Gradients are scattered after every micro-step, so that they never exist whole; with `replicate`
  the shards exist several times, and are summed over the copies once a step. With 2 parameters stay gathered from the
  first forward pass of a step to its last backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.compression import Compression
from meshwright.comm.compressors import Compressor
from meshwright.comm.travel import Travel
from meshwright.models.decoder import Decoder
from meshwright.models.expert_plan import holders_of
from meshwright.parallel import buckets
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import Precision
from meshwright.parallel.torch_releases import BUFFERS_STAY_LOCAL, group_for_ddp
from meshwright.parallel.unused import AllUsed, LeftOut, Used, broken_promise
from meshwright.strategy import Strategy
from meshwright.torch_private import beside
from meshwright.torch_private_fsdp import reduce_gradients
from meshwright.torch_private_fsdp import replicate as replicate_composable

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
    if mesh.loss.size() == 1 or strategy.sums_in_buckets:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param if precision.mixed else None,
        reduce_dtype=precision.reduce if precision.mixed or precision.reduce != precision.stored else None,
        cast_forward_inputs=False,
    )
    held_apart = _wrap_experts(model, strategy, mesh, policy)
    over = beside(mesh["replicate"], mesh.state) if strategy.replicate > 1 else mesh.state
    split = _replicating(mesh.loss, policy) if strategy.zero < 2 else _sharding(strategy, over, policy)
    units = [[module for module in unit if module not in held_apart] for unit in units]
    units = [unit for unit in units if unit]
    for unit in units:
        split(unit if len(unit) > 1 else unit[0], False)
    split(model, True)
    if reduction == "sum":
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(1.0)
            # A divided sum is an operation of its own that gloo does not have; a plain sum is what is wanted anyway.
            module.set_force_sum_reduction_for_comms(True)
    if isinstance(model, Decoder):
        # Calls all of its layers, and uses all that is in them.
        return
    assert isinstance(model, FSDPModule)
    watch = AllUsed if _uses_all(model) else Used
    watch(model, mesh.loss.get_group(), torch.device(mesh.axes.device_type))
    # A stage of a pipeline leaves out on purpose, and all ranks alike.
    if strategy.pp == 1 and strategy.wrap.partition(":")[0] in ("auto", "block"):
        LeftOut(model, units)


def _uses_all(model: nn.Module) -> bool:
    """Whether every pass uses all parameters, as the class promises."""
    return getattr(model, "uses_all_parameters", False)


def _wrap_experts(model: nn.Module, strategy: Strategy, mesh: Mesh, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Make units of their own of experts that ranks have dealt out: only ranks with the same ones add gradients up."""
    places = mesh.experts
    if places is None:
        return []
    over = beside(places["expert_replicate"], places.state) if strategy.expert_copies[0] > 1 else places.state
    split = _replicating(places.copies, policy) if strategy.zero < 2 else _sharding(strategy, over, policy)
    found = list(holders_of(model).values())
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
) -> tuple[nn.Module, Compressor | None]:
    """The module to call for a training step: where parameters are whole, one that reduces their gradients; and what
    compresses them on their way."""
    if mesh.loss.size() == 1 or not strategy.sums_in_buckets:
        return model, None
    group = group_for_ddp(mesh.loss.get_group())
    # It finds out by itself, without being told that it might.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    replica = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=travel.bucket_bytes / 2**20,
        find_unused_parameters=not _uses_all(model),
        **BUFFERS_STAY_LOCAL,
    )
    compression = Compression.parse(strategy.compress)
    return replica, buckets.register(replica, group, travel, compression, precision, reduction == "mean")


def synchronise(model: nn.Module, replica: nn.Module, zero: int, now: bool) -> AbstractContextManager[None]:
    """The context of a forward and backward pass: the last one of a step (now), or one before it."""
    if isinstance(replica, DistributedDataParallel):
        return _complete(replica) if now else replica.no_sync()
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(now)
        if zero < 2:
            model.set_requires_gradient_sync(now)
        else:
            model.set_requires_all_reduce(now)
        if zero == 2:
            model.set_reshard_after_backward(now)
    return nullcontext()


@contextmanager
def _complete(replica: DistributedDataParallel) -> Iterator[None]:
    """A pass after which all gradients must be there, where DDP was not told to look for those that are not."""
    yield
    if not replica.find_unused_parameters:
        for name, parameter in replica.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise broken_promise(name)


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
