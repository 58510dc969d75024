"""Lay a strategy over a model that was written for one device: the one way in, for the trainer and for other loops.

Order: pipeline, products in 8 bits, tensor parallel, context parallel, expert parallel, compilation, recompute, host
memory, precision, data parallel. A model on the meta device stays there, so that each rank can give memory to its own
part; one with weights keeps those of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.travel import Travel
from meshwright.context_layout import ContextLayout
from meshwright.cuts import SMALL_UNIT
from meshwright.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures
from meshwright.models.reads import around_forward
from meshwright.parallel import compile, context, data, experts, precision, recompute, tensor
from meshwright.parallel.bucket_size import measured_bucket_mb
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.host_activations import HostActivations
from meshwright.parallel.mesh import Mesh, make_mesh
from meshwright.parallel.model import Parallel
from meshwright.parallel.pipeline import Batch, Pipeline
from meshwright.parallel.precision import Precision
from meshwright.parallel.stages import keep_stages
from meshwright.parallel.torch_releases import group_of
from meshwright.parallel.units import blocks_of, units_of
from meshwright.parallel.world import local_ranks, visible_gpus
from meshwright.schedules import stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy


def parallelize(
    model: nn.Module,
    strategy: Strategy | str,
    mesh: Mesh | None = None,
    *,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    compiled: bool = False,
    travel: Travel | None = None,
) -> Parallel:
    """The model under a strategy, split in place; `compiled` lets torch.compile have its layers, `travel` says how
    gradients travel.

    Gradients are averaged over the data-parallel ranks, as DDP does; with `reduction="sum"` they are summed, for a
    loss that is already divided by the global count of tokens. Without a mesh, one is made over all ranks of the
    process group, which is started from a launcher's variables (torchrun, ...) if there is none yet.
    """
    world = _world_size()
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy, world)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    policy = precision or Precision(*(dtype,) * 3, buffer=None)
    check_model(model, strategy, world)
    travel = travel or Travel()
    travel.check(strategy)
    if mesh is None and strategy.world > 1:
        _start_group()
        mesh = make_mesh(strategy, _device_type(model))
    if mesh is not None:
        _take_first_ranks_weights(model)
    if travel.bucket_mb == "auto":
        travel = replace(travel, bucket_mb=_measured_bucket_mb(model, mesh, policy))
    return _apply(model, strategy, mesh, policy, reduction, compiled, travel)


def _measured_bucket_mb(model: nn.Module, mesh: Mesh | None, policy: Precision) -> float | None:
    if mesh is None or mesh.loss.size() == 1:
        return None
    size = sum(parameter.numel() for parameter in model.parameters()) * policy.reduce.itemsize
    return measured_bucket_mb(mesh.loss.get_group(), size, torch.device(mesh.axes.device_type))


def _apply(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh | None,
    policy: Precision,
    reduction: Reduction,
    compiled: bool,
    travel: Travel,
) -> Parallel:
    precision.check(model, policy)
    pipeline = None
    if strategy.pp > 1:
        assert isinstance(model, Decoder)
        assert mesh is not None
        pipeline = _cut(model, strategy, mesh, policy)
    # Found before anything is split: splitting changes what parameters are shared, not which modules there are.
    least = int(travel.bucket_bytes / policy.reduce.itemsize) if travel.bucket_mb is not None else SMALL_UNIT
    units = units_of(model, strategy.wrap, pipeline.own_layers if pipeline is not None else None, least)
    tokens: Context | None = None
    if policy.float8 is not None:
        precision.multiply_in_float8(model, policy.float8)
    if mesh is not None:
        for mixture in mixtures(model):
            mixture.data_group = mesh.loss.get_group() if mesh.loss.size() > 1 else None
            mixture.auxiliary_factor = (mesh.loss.size() if reduction == "mean" else 1) / strategy.tp
        if strategy.tp > 1:
            axis = tensor.apply(model, mesh["tp"], strategy.sp, policy.reduce)
            if pipeline is not None:
                around_forward(model, partial(_begin, axis, model))
            if isinstance(model, Decoder) and model.spec.dropout:
                around_forward(model, partial(_with_samples, model))
        if strategy.cp > 1:
            tokens = context.apply(model, ContextLayout.of(strategy.cp, strategy.cp_method), mesh)
        if mesh.experts is not None:
            experts.apply(model, mesh.experts, reduction)
    wide = precision.not_in_float8(model, policy.float8) if policy.float8 is not None else {}
    again, blocks = _own_share(strategy.recompute, pipeline), blocks_of(model)
    if compiled:
        compile.apply(blocks, again)
        again = "none" if compile.decides(again) else again
    # The decoder draws no random numbers of its own; another model may.
    host = HostActivations() if strategy.host_activations else None
    recompute.apply(blocks, again, draws=not isinstance(model, Decoder), host=host)
    if host is not None:
        host.apply(blocks, has_last=pipeline is None or pipeline.has_last, compiled=compiled)
    precision.apply(model, policy)
    if mesh is not None:
        data.apply(model, units, strategy, mesh, policy, reduction)
    return Parallel(model, strategy, mesh, policy, reduction, pipeline, tokens, wide, host, travel)


def _cut(model: Decoder, strategy: Strategy, mesh: Mesh, policy: Precision) -> Pipeline:
    """Leave the model the layers of this rank's stages."""
    layers = stage_layers(model.spec, strategy.pp * stages_per_rank(strategy.schedule), strategy.layers)
    # A group of its own: ranks send unlike numbers of messages, by which checks of collectives would be confused.
    group = group_of(dist.get_process_group_ranks(mesh["pp"].get_group()))

    layout, rank = ContextLayout.of(strategy.cp, strategy.cp_method), mesh["cp"].get_local_rank()

    def border(batch: Batch) -> Tensor:
        samples, tokens = batch["tokens_BT"].shape
        if batch.get("cache") is None:
            tokens = layout.part_lengths(tokens)[rank]
        if strategy.sp and tokens % strategy.tp == 0:
            tokens //= strategy.tp
        return torch.empty(
            samples, tokens, model.spec.hidden_size, dtype=policy.param, device=batch["tokens_BT"].device
        )

    pipeline = Pipeline(model, strategy.schedule, layers, group, border, model.model.layers["0"])
    keep_stages(model, layers, pipeline.stages)
    return pipeline


def _begin(
    axis: tensor.Axis, model: nn.Module, forward: Callable[..., Tensor], tokens_BT: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Stages without an embedding must learn of the sequence's length as well."""
    axis.begin(tokens_BT.shape[1], model.training)
    return forward(tokens_BT, *rest, **options)


def _own_share(kind: str, pipeline: Pipeline | None) -> str:
    """Of the first N layers, how many are this rank's."""
    if pipeline is None or not kind.startswith("first:"):
        return kind
    first = int(kind.removeprefix("first:"))
    own = sum(layer < first for layers in pipeline.own_layers for layer in layers)
    return f"first:{own}" if own else "none"


def check_model(model: nn.Module, strategy: Strategy, world: int) -> None:
    """Raise a ConfigError, before any process group is made, for what the model cannot take."""
    strategy.check_any(world)
    if isinstance(model, Decoder):
        strategy.check(model.spec, world)
    elif strategy.pp > 1:
        raise ConfigError(
            f"pp={strategy.pp} cuts Meshwright's own decoder into stages and does not know how to cut "
            f"{type(model).__name__}; use pp=1 with zero=3 or tp"
        )
    units_of(model, strategy.wrap)
    if strategy.tp > 1:
        tensor.check(model, strategy.tp)
    if strategy.cp > 1:
        context.check(model)
    if strategy.ep > 1:
        experts.check(model, strategy.ep)


def _with_samples(
    model: nn.Module,
    forward: Callable[..., Tensor],
    tokens_BT: Tensor,
    positions_BT: Tensor | None = None,
    samples_B: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Ranks that split a model must drop the same things: they cannot each draw numbers of their own."""
    if samples_B is None and model.training:
        raise ValueError("with dropout and tp, give the model `samples_B`, the global numbers of its sequences")
    return forward(tokens_BT, positions_BT, samples_B, **options)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _start_group() -> None:
    if dist.is_initialized():
        return
    gpus, local = visible_gpus(), local_ranks(_world_size())
    if 0 < gpus < local:
        raise ConfigError(
            f"{local} processes on this machine and {gpus} GPU{'s' * (gpus > 1)}: NCCL takes one process for each. To "
            'share GPUs, call torch.distributed.init_process_group("gloo") before: right results, not speed'
        )
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def _device_type(model: nn.Module) -> str:
    """Where the ranks compute: on GPUs over NCCL, or over gloo where the model is on one."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return "cuda" if on_gpu or "nccl" in dist.get_backend() else "cpu"


@torch.no_grad()
def _take_first_ranks_weights(model: nn.Module) -> None:
    """Let every rank start from rank 0's weights, where there are any yet."""
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            dist.broadcast(value.data, src=0)
