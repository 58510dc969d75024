"""A model under a strategy: called like the model, trained in micro-steps, or as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.comm.compression import NONE, ring
from meshwright.comm.compressors import Compressor
from meshwright.comm.travel import BACKEND, Travel
from meshwright.models.attention import KeyValueCache
from meshwright.models.decoder import Decoder
from meshwright.models.parts import whole
from meshwright.parallel import data
from meshwright.parallel.bubble import Bubble, bubble_of
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.host_activations import HostActivations
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.norm import clip_grad_norm_, grad_norm
from meshwright.parallel.pipeline import Batch, Loss, Pipeline
from meshwright.parallel.precision import Precision
from meshwright.parallel.spans import Spans
from meshwright.parallel.stages import TiedEmbedding
from meshwright.pulse import Pulse
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
        wide: Mapping[str, str] | None = None,
        host_activations: HostActivations | None = None,
        travel: Travel | None = None,
    ) -> None:
        self.module = module
        self.pipeline = pipeline
        self.strategy = strategy
        self.mesh = mesh
        self.precision = policy
        self.wide = wide or {}
        """Of a model whose linears multiply in 8 bits: modules of this rank that do not, and why."""
        self.host_activations = host_activations
        """What keeps activations in host memory, where the strategy says so."""
        self._reduction = reduction
        self.travel = travel or Travel()
        """How gradients travel, with what was measured for it."""
        self._tied_copy: TiedEmbedding | None = None
        self.last_step: Spans | None = None
        self._context = context
        self._replica: nn.Module | None = None
        self.compressor: Compressor | None = None
        """What makes gradients smaller for their way, where the strategy says so; known once it was called."""
        self.pulse = Pulse()
        """Where this rank says which pass it is in."""

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
                self._replica, self.compressor = data.wrap_ddp(
                    self.module, self.strategy, self.mesh, self.precision, self._reduction, self.travel
                )
        return self._replica

    def without_ddp(self) -> None:
        """Call the module itself, and sum no gradients of whole parameters: for rehearsals, which have no memory."""
        self._replica = self.module

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
    def weight(self) -> float:
        """By what a mean over this rank's samples is multiplied, so that the average over ranks is that of all samples;
        one, unless the strategy deals out shares."""
        return self.strategy.data_shares[self.data_rank] * self.strategy.dp / self.strategy.all_shares

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
                if index:
                    self.pulse.enter("forward")
                with self.micro_step(last=index == len(batches) - 1):
                    loss(self(**batch), index).backward()
            return
        if self.strategy.cp > 1 and self.strategy.recompute != "none":
            lengths = {batch["tokens_BT"].shape[1] for batch in batches}
            if len(lengths) > 1:
                raise ValueError(
                    f"micro-batches of {sorted(lengths)} tokens: with cp and recompute all of a step must be as long"
                )
        with self._tied.shared() if self._tied is not None else nullcontext():
            data.accumulate(self.module, self.strategy.zero)
            self.last_step = self.pipeline.forward_backward(batches, loss, self.pulse)
            data.reduce(self.module)

    @property
    def sums_beside(self) -> bool:
        """Whether a thread of its own sums gradients while the backward pass goes on."""
        return self.mesh is not None and (self.strategy.compress != NONE or self.travel.all_reduce != BACKEND)

    def sent_bytes(self) -> tuple[int, int] | None:
        """Bytes of compressed gradients that this rank has sent since the last question, and what it would send without
        compression; None where there is none."""
        if self.compressor is None:
            return None
        numbers = sum(parameter.numel() for parameter in self.parameters())
        whole = ring(numbers, self.compressor.group.size(), self.precision.reduce.itemsize)
        sent, self.compressor.sent = self.compressor.sent, 0
        return sent, whole

    def bubble(self) -> Bubble | None:
        """How much of the last step's passes the ranks of the pipeline waited; None without one. All ranks must ask."""
        if self.pipeline is None or self.last_step is None or self.stages is None:
            return None
        program = self.pipeline.program(self.last_step.micro_batches)
        return bubble_of(program, *self.last_step.times(), self.stages, next(self.parameters()).device)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], finish: Callable[[Tensor, int], Result]) -> list[Result]:
        """What `finish(output, index)` gives for the output of each batch, where `has_loss`; elsewhere nothing."""
        if self.pipeline is not None:
            return self.pipeline.forward(batches, finish, self.pulse)
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
        again = self._counted_elsewhere()
        return clip_grad_norm_(self.parameters(), max_norm, scale=scale, pipeline=self.stages, counted_elsewhere=again)

    def grad_norm(self, *, scale: float = 1.0) -> Tensor:
        """The norm of all gradients of the whole model, of a loss that was multiplied by `scale`."""
        again = self._counted_elsewhere()
        return grad_norm(self.parameters(), scale=scale, pipeline=self.stages, counted_elsewhere=again)

    def _counted_elsewhere(self) -> list[Tensor]:
        return [self._tied.weight] if self._tied is not None and not self._tied.counts else []

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
        on_host = strategy.host_states == "optimizer"
        split = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        if not (split or rows_over is not None or on_host):
            return make(taken, **options)
        return LocalOptimizer(taken, lambda held: make(held, **options), rows_over=rows_over, on_host=on_host)

    def reshard(self) -> None:
        """Put gathered weights back into shards after a forward pass that no backward pass follows."""
        data.reshard(self.module)
