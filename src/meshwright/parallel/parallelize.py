"""Lay a strategy over a model that was written for one device: the one way in, for the trainer and for other loops.

Order: tensor parallel, context parallel, recompute, precision, data parallel. A model on the meta device stays there,
so that each rank can give memory to its own part; one with weights keeps those of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.context_layout import ContextLayout
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures
from meshwright.parallel import context, data, precision, recompute, tensor
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.mesh import Mesh, make_mesh
from meshwright.parallel.precision import Precision
from meshwright.parallel.reads import around_forward
from meshwright.parallel.units import blocks_of, units_of
from meshwright.strategy import Strategy


class Parallel:
    """A model under a strategy. Call it like the model; `module` is the model itself, split in place."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        mesh: Mesh | None,
        policy: Precision,
        reduction: Reduction,
        context: Context | None = None,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.mesh = mesh
        self.precision = policy
        self._reduction = reduction
        self._context = context
        self._replica: nn.Module | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The forward pass of this rank's samples, whole on every rank; what comes out is that of its own tokens."""
        return self.replica(*inputs, **options)

    @property
    def replica(self) -> nn.Module:
        """The module that is called; made when it is first needed, since it takes a model that has its memory."""
        if self._replica is None:
            self._replica = self.module
            if self.mesh is not None:
                self._replica = data.wrap_ddp(self.module, self.strategy, self.mesh, self.precision, self._reduction)
        return self._replica

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters as they are stored: DTensors where they are split."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as they are stored, with the names that they have on one device."""
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> Parallel:
        """Put the model into training mode, or out of it."""
        self.module.train(mode)
        return self

    def eval(self) -> Parallel:
        """Put the model into evaluation mode."""
        return self.train(False)

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this rank's: one of `strategy.dp`."""
        return self.mesh.data.get_local_rank() if self.mesh is not None else 0

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """What is this rank's of something known of whole sequences, such as targets; tokens are the last dimension."""
        return x_BT if self._context is None else self._context.own_tokens(x_BT)

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """The context of one of several forward and backward passes of a step; gradients travel when they must."""
        return data.synchronise(self.module, self.replica, self.strategy.zero, last)

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], groups: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of the model's parameters (or of `groups` of them), with its state where the strategy says."""
        taken = list(self.parameters() if groups is None else groups)
        if taken and not isinstance(taken[0], dict):
            taken = [{"params": taken}]
        strategy = self.strategy
        rows_over = self.mesh if strategy.zero == 1 and self.mesh is not None and self.mesh.state.size() > 1 else None
        on_host = strategy.offload == "optimizer"
        split = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        if not (split or rows_over is not None or on_host):
            return make(taken, **options)
        return LocalOptimizer(taken, lambda held: make(held, **options), rows_over=rows_over, on_host=on_host)

    def reshard(self) -> None:
        """Put gathered weights back into shards after a forward pass that no backward pass follows."""
        data.reshard(self.module)


def parallelize(
    model: nn.Module,
    strategy: Strategy | str,
    mesh: Mesh | None = None,
    *,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
) -> Parallel:
    """The model under a strategy, split in place.

    Gradients are averaged over the data-parallel ranks, as DDP does; with `reduction="sum"` they are summed, for a
    loss that is already divided by the global count of tokens. Without a mesh, one is made over all ranks of the
    process group, which is started from a launcher's variables (torchrun, ...) if there is none yet.
    """
    world = _world_size()
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy, world)
    policy = precision or Precision(*(next(model.parameters()).dtype,) * 3, buffer=None)
    _check(model, strategy, world)
    if mesh is None and strategy.world > 1:
        _start_group()
        mesh = make_mesh(strategy, "cuda" if "nccl" in dist.get_backend() else "cpu")
    if mesh is not None:
        _take_first_ranks_weights(model)
    return _apply(model, strategy, mesh, policy, reduction)


def _apply(
    model: nn.Module, strategy: Strategy, mesh: Mesh | None, policy: Precision, reduction: Reduction
) -> Parallel:
    # Found before anything is split: splitting changes what parameters are shared, not which modules there are.
    units = units_of(model, strategy.wrap)
    tokens: Context | None = None
    if mesh is not None:
        for mixture in mixtures(model):
            mixture.data_group = mesh.loss.get_group() if mesh.loss.size() > 1 else None
            mixture.auxiliary_factor = (mesh.loss.size() if reduction == "mean" else 1) / strategy.tp
        if strategy.tp > 1:
            tensor.apply(model, mesh["tp"], strategy.sp, policy.reduce)
            if isinstance(model, Decoder) and model.spec.dropout:
                around_forward(model, _with_samples)
        if strategy.cp > 1:
            tokens = context.apply(model, ContextLayout.of(strategy.cp, strategy.cp_method), mesh)
    # The decoder draws no random numbers of its own; another model may.
    recompute.apply(blocks_of(model), strategy.recompute, draws=not isinstance(model, Decoder))
    precision.apply(model, policy)
    if mesh is not None:
        data.apply(model, units, strategy, mesh, policy, reduction)
    return Parallel(model, strategy, mesh, policy, reduction, tokens)


def _check(model: nn.Module, strategy: Strategy, world: int) -> None:
    """Refuse, before any process group is made, what the model cannot take."""
    strategy.check_any(world)
    if isinstance(model, Decoder):
        strategy.check(model.spec, world)
    units_of(model, strategy.wrap)
    if strategy.tp > 1:
        tensor.check(model, strategy.tp)
    if strategy.cp > 1:
        context.check(model)


def _with_samples(
    forward: Callable[..., Tensor], *inputs: Any, samples_B: Tensor | None = None, **options: Any
) -> Tensor:
    """Ranks that split a model must drop the same things: they cannot each draw numbers of their own."""
    if samples_B is None and torch.is_grad_enabled():
        raise ValueError("with dropout and tp, give the model `samples_B`, the global numbers of its sequences")
    return forward(*inputs, samples_B=samples_B, **options)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _start_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


@torch.no_grad()
def _take_first_ranks_weights(model: nn.Module) -> None:
    """Let every rank start from rank 0's weights, where there are any yet."""
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            dist.broadcast(value.data, src=0)
