"""Lay a strategy over a model that was written for one device: the one way in, for the trainer and for other loops.

Order: pipeline, tensor parallel, context parallel, expert parallel, recompute, precision, data parallel. A model on the
meta device stays there, so that each rank can give memory to its own part; one with weights keeps those of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.context_layout import ContextLayout
from meshwright.errors import ConfigError
from meshwright.models.attention import KeyValueCache
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures
from meshwright.models.parts import whole
from meshwright.parallel import context, data, experts, precision, recompute, tensor
from meshwright.parallel.bubble import Bubble, bubble_of
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.mesh import Mesh, make_mesh
from meshwright.parallel.norm import clip_grad_norm_
from meshwright.parallel.pipeline import Batch, Loss, Pipeline
from meshwright.parallel.precision import Precision
from meshwright.parallel.reads import around_forward
from meshwright.parallel.spans import Spans
from meshwright.parallel.stages import TiedEmbedding, keep_stages
from meshwright.parallel.torch_releases import group_of
from meshwright.parallel.units import blocks_of, units_of
from meshwright.schedules import stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy

Result = TypeVar("Result")


class Parallel:
    """A model under a strategy. Call it like the model; `module` is the model itself, split in place."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        mesh: Mesh | None,
        policy: Precision,
        reduction: Reduction,
        pipeline: Pipeline | None = None,
        context: Context | None = None,
    ) -> None:
        self.module = module
        self.pipeline = pipeline
        self.strategy = strategy
        self.mesh = mesh
        self.precision = policy
        self._reduction = reduction
        self._tied_copy: TiedEmbedding | None = None
        self.last_step: Spans | None = None
        self._context = context
        self._replica: nn.Module | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The forward pass of this rank's samples, whole on every rank; what comes out is that of its own tokens."""
        if self.pipeline is not None:
            raise ValueError(
                "a pipeline's ranks cannot be called one by one; "
                "use parallel.forward_backward(batches, loss) to train, parallel.forward(batches, finish) to evaluate"
            )
        return self.replica(*inputs, **options)

    @property
    def replica(self) -> nn.Module:
        """The module that is called; made when it is first needed, since it takes a model that has its memory."""
        if self._replica is None:
            self._replica = self.module
            if self.mesh is not None:
                self._replica = data.wrap_ddp(self.module, self.strategy, self.mesh, self.precision, self._reduction)
        return self._replica

    @property
    def _tied(self) -> TiedEmbedding | None:
        """The weight that the ranks of the first and the last stage share; found late, since splitting replaces it."""
        module, pipeline = self.module, self.pipeline
        if pipeline is None or not (isinstance(module, Decoder) and module.spec.tie_word_embeddings):
            return None
        if pipeline.has_first == pipeline.has_last:
            return None
        if self._tied_copy is None:
            other = pipeline.placement[-1 if pipeline.has_first else 0]
            (weight,) = module.model.embed_tokens.parameters()
            self._tied_copy = TiedEmbedding(weight, other, pipeline.has_first, pipeline.group)
        return self._tied_copy

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

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank is the first of those that hold the same layers."""
        mesh = self.mesh
        return mesh is None or not any(mesh[axis].get_local_rank() for axis in ("replicate", "shard", "cp", "tp"))

    @property
    def has_loss(self) -> bool:
        """Whether the model's output is on this rank: it holds the last stage."""
        return self.pipeline is None or self.pipeline.has_last

    def forward_backward(self, batches: Sequence[Batch], loss: Loss) -> None:
        """The forward and backward passes of a step's micro-batches; gradients are reduced over ranks.

        A batch is the model's keyword arguments; `loss(output, index)` gives what gradients are taken of, and is
        called where `has_loss`.
        """
        if self.pipeline is None:
            for index, batch in enumerate(batches):
                with self.micro_step(last=index == len(batches) - 1):
                    loss(self(**batch), index).backward()
            return
        data.accumulate(self.module, self.strategy.zero)
        self.last_step = self.pipeline.forward_backward(batches, loss)
        data.reduce(self.module)
        if self._tied is not None:
            self._tied.sum_gradients()

    def bubble(self) -> Bubble | None:
        """How much of the last step's passes the ranks of the pipeline waited; None without one. All ranks must ask."""
        if self.pipeline is None or self.last_step is None or self.stages is None:
            return None
        return bubble_of(self.pipeline.program(self.last_step.micro_batches), *self.last_step.times(), self.stages)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], finish: Callable[[Tensor, int], Result]) -> list[Result]:
        """What `finish(output, index)` gives for the output of each batch, where `has_loss`; elsewhere nothing."""
        if self.pipeline is not None:
            return self.pipeline.forward(batches, finish)
        return [finish(self.module(**batch), index) for index, batch in enumerate(batches)]

    @torch.no_grad()
    def predict(self, tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        """The logits after the last of these tokens, which follow those in the cache; on every rank."""
        pipeline = self.pipeline
        if pipeline is None:
            return whole(self.module(tokens_BT, cache=cache))[:, -1]
        assert isinstance(self.module, Decoder)
        start = cache.length
        positions_BT = torch.arange(start, start + tokens_BT.shape[1], device=tokens_BT.device)[None]
        batch = {"tokens_BT": tokens_BT, "positions_BT": positions_BT, "cache": cache}
        found = pipeline.forward([batch], lambda logits, _: whole(logits)[:, -1].float().contiguous())
        shape = len(tokens_BT), self.module.spec.vocab_size
        logits_BV = found[0] if found else torch.empty(shape, device=tokens_BT.device)
        dist.broadcast(logits_BV, group=self.stages, group_src=pipeline.placement[-1])
        return logits_BV

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks of the pipeline, for what they do together."""
        return self.mesh["pp"].get_group() if self.pipeline is not None and self.mesh is not None else None

    def clip_grad_norm_(self, max_norm: float, *, scale: float = 1.0) -> Tensor:
        """The norm of all gradients of the whole model, which are scaled down to `max_norm` where it is exceeded."""
        again = [self._tied.weight] if self._tied is not None and not self._tied.counts else []
        return clip_grad_norm_(self.parameters(), max_norm, scale=scale, pipeline=self.stages, counted_elsewhere=again)

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
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    policy = precision or Precision(*(dtype,) * 3, buffer=None)
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
    pipeline = None
    if strategy.pp > 1:
        assert isinstance(model, Decoder)
        assert mesh is not None
        pipeline = _cut(model, strategy, mesh, policy)
    # Found before anything is split: splitting changes what parameters are shared, not which modules there are.
    units = units_of(model, strategy.wrap, pipeline.own_layers if pipeline is not None else None)
    tokens: Context | None = None
    if mesh is not None:
        for mixture in mixtures(model):
            mixture.data_group = mesh.loss.get_group() if mesh.loss.size() > 1 else None
            mixture.auxiliary_factor = (mesh.loss.size() if reduction == "mean" else 1) / strategy.tp
        if strategy.tp > 1:
            axis = tensor.apply(model, mesh["tp"], strategy.sp, policy.reduce)
            if pipeline is not None:
                around_forward(model, partial(_begin, axis, model))
            if isinstance(model, Decoder) and model.spec.dropout:
                around_forward(model, _with_samples)
        if strategy.cp > 1:
            tokens = context.apply(model, ContextLayout.of(strategy.cp, strategy.cp_method), mesh)
        if mesh.experts is not None:
            experts.apply(model, mesh.experts, reduction)
    # The decoder draws no random numbers of its own; another model may.
    recompute.apply(blocks_of(model), _own_share(strategy.recompute, pipeline), draws=not isinstance(model, Decoder))
    precision.apply(model, policy)
    if mesh is not None:
        data.apply(model, units, strategy, mesh, policy, reduction)
    return Parallel(model, strategy, mesh, policy, reduction, pipeline, tokens)


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


def _check(model: nn.Module, strategy: Strategy, world: int) -> None:
    """Refuse, before any process group is made, what the model cannot take."""
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
