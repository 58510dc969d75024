"""Lay a strategy over a model that was written for one device: the one way in, for the trainer and for other loops.

Order: pipeline, products in 8 bits, tensor parallel, context parallel, expert parallel, compilation, recompute, host
memory, precision, data parallel. A model on the meta device stays there, so that each rank can give memory to its own
part; one with weights keeps those of rank 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.compression import Compression
from meshwright.comm.travel import Travel
from meshwright.context_layout import ContextLayout
from meshwright.errors import ConfigError
from meshwright.models import expert_plan
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures
from meshwright.models.reads import around_forward
from meshwright.parallel import (
    batch_norm,
    compile,
    context,
    data,
    experts,
    pipeline_units,
    precision,
    recompute,
    router_losses,
    tensor,
)
from meshwright.parallel.batch_norm import Counting
from meshwright.parallel.bucket_size import measured_bucket_mb
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.host_activations import HostActivations
from meshwright.parallel.mesh import Mesh, make_mesh
from meshwright.parallel.module_stages import ModuleStages
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.precision import Precision
from meshwright.parallel.stages import DecoderStages
from meshwright.parallel.torch_releases import group_of
from meshwright.parallel.units import blocks_of, holders_of_shared, own_size, units_of
from meshwright.parallel.world import local_ranks, visible_gpus
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
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}, and an nn.Module is wanted: parallelize(Net(), ...)")
    if not isinstance(strategy, str | Strategy):
        raise ConfigError(f'the strategy is {strategy!r}, and words are wanted, such as "dp=2 zero=3" or "auto"')
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, and a mesh of a strategy's axes is wanted: "
            'meshwright.make_mesh(strategy, "cuda" or "cpu"), or none'
        )
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
    _tell_beginning(strategy, travel)
    return _apply(model, strategy, mesh, policy, reduction, compiled, travel)


def _tell_beginning(strategy: Strategy, travel: Travel) -> None:
    """Say when compression begins in a loop whose length is not known, on the first rank."""
    whole = travel.whole_steps(Compression.parse(strategy.compress))
    if travel.compress_after is None and whole and strategy.dp > 1 and dist.get_rank() == 0:
        print(
            f"meshwright: compress={strategy.compress} begins after {whole} steps that travel whole, since "
            "nobody knows how long this loop is; parallelize(..., travel=Travel(compress_after=N)) sets it",
            file=sys.stderr,
            flush=True,
        )


def _measured_bucket_mb(model: nn.Module, mesh: Mesh | None, policy: Precision) -> float | None:
    if mesh is None or mesh.loss.size() == 1:
        return None
    size = own_size(model) * policy.reduce.itemsize
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
    pipeline, stages, blocks = None, None, blocks_of(model)
    if strategy.pp > 1:
        assert mesh is not None
        pipeline, stages = _cut(model, strategy, mesh, policy)
        blocks = [block for run in stages for block in run]
    # Found before anything is split: splitting changes what parameters are shared, not which modules there are.
    shared = holders_of_shared(model)
    units = units_of(model, strategy.wrap, stages)
    if pipeline is not None:
        pipeline.cut.check_wrapped([module for unit in units for module in unit], strategy.wrap)
    tokens: Context | None = None
    if policy.float8 is not None:
        precision.multiply_in_float8(model, policy.float8)
    if mesh is not None:
        for mixture in mixtures(model):
            mixture.data_group = mesh.loss.get_group() if mesh.loss.size() > 1 else None
            mixture.auxiliary_factor = (mesh.loss.size() if reduction == "mean" else 1) / strategy.tp
        router_losses.apply(model, strategy, mesh, reduction)
        if strategy.tp > 1:
            axis = tensor.apply(model, mesh["tp"], strategy.sp, policy.reduce)
            if isinstance(model, Decoder) and pipeline is not None:
                around_forward(model, partial(_begin, axis, model))
            if isinstance(model, Decoder) and model.spec.dropout:
                around_forward(model, partial(_with_samples, model))
        if strategy.cp > 1:
            tokens = context.apply(model, ContextLayout.of(strategy.cp, strategy.cp_method), mesh)
        if mesh.experts is not None:
            experts.apply(model, mesh.experts, reduction)
    if travel.bucket_mb == "auto":
        travel = replace(travel, bucket_mb=_measured_bucket_mb(model, mesh, policy))
    if travel.bucket_mb is not None:
        # What travels together is what a rank has of it.
        units = units_of(model, strategy.wrap, stages, int(travel.bucket_bytes / policy.reduce.itemsize), shared)
    wide = precision.not_in_float8(model, policy.float8) if policy.float8 is not None else {}
    counting = Counting()
    over_ranks = mesh.loss.get_group() if mesh is not None and mesh.loss.size() > 1 else None
    synchronised = batch_norm.has_synchronised(model)
    if over_ranks is not None or strategy.recompute != "none" or policy.mixed or synchronised:
        batch_norm.apply(model, over_ranks, counting)
    again = _own_share(strategy.recompute, pipeline)
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
    return Parallel(model, strategy, mesh, policy, reduction, pipeline, tokens, wide, host, travel, counting)


def _cut(model: nn.Module, strategy: Strategy, mesh: Mesh, policy: Precision) -> tuple[Pipeline, list[list[nn.Module]]]:
    """Leave the model the layers of this rank's stages, which are listed."""
    # A group of its own: ranks send unlike numbers of messages, by which checks of collectives would be confused.
    group = group_of(dist.get_process_group_ranks(mesh["pp"].get_group()))
    cut: DecoderStages | ModuleStages
    if isinstance(model, Decoder):
        cut = DecoderStages(model, strategy, mesh, policy.param)
    else:
        cut = ModuleStages(model, strategy, policy)
    pipeline = Pipeline(model, strategy.schedule, cut, group)
    stages = cut.blocks(blocks_of(model), pipeline.stages)
    cut.keep(pipeline.stages)
    return pipeline, stages


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
        pipeline_units.check(model, strategy)
    units_of(model, strategy.wrap)
    batch_norm.check(model, strategy.tp, strategy.dp * strategy.cp)
    scalar = next((name for name, parameter in model.named_parameters() if not parameter.ndim), None)
    if scalar is not None and strategy.zero and strategy.dp * strategy.cp > 1:
        raise ConfigError(
            f"zero={strategy.zero} cuts parameters along their first dimension, and {scalar} has none; "
            "give it the shape (1,), or use zero=0"
        )
    turned = next((name for name, one in model.named_parameters() if not one.is_contiguous()), None)
    if turned is not None and strategy.zero >= 2 and strategy.dp * strategy.cp > 1:
        raise ConfigError(
            f"zero={strategy.zero} cuts parameters that lie in one row, and {turned} does not (channels_last, or a "
            "transposed view); make it .contiguous() before parallelize, or use zero=0 or 1"
        )
    if strategy.tp > 1:
        tensor.check(model, strategy.tp)
    if strategy.cp > 1:
        context.check(model)
    if strategy.ep > 1:
        expert_plan.check(model, strategy.ep)


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
