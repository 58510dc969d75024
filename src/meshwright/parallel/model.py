"""A model under a strategy: called like the model, trained in micro-steps, or as the stages of a pipeline.

`own_loop.py` has what a loop of one's own calls beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.comm.compression import NONE
from meshwright.comm.compressors import Compressor
from meshwright.comm.travel import BACKEND, Travel
from meshwright.models.attention import KeyValueCache
from meshwright.models.decoder import Decoder
from meshwright.models.parts import whole
from meshwright.parallel import data
from meshwright.parallel.batch_norm import Counting
from meshwright.parallel.bubble import Bubble, bubble_of
from meshwright.parallel.context import Context
from meshwright.parallel.data import Reduction
from meshwright.parallel.host_activations import HostActivations
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.norm import clip_grad_norm_, grad_norm
from meshwright.parallel.own_loss import LossOf, OwnLoss
from meshwright.parallel.pipeline import Batch, Call, Loss, Pipeline, as_call
from meshwright.parallel.precision import Precision
from meshwright.parallel.spans import Spans
from meshwright.parallel.stages import SharedWeight, shared_weights, tokens_of
from meshwright.pulse import Pulse
from meshwright.strategy import Strategy

Result = TypeVar("Result")


class SplitModel:
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
        counting: Counting | None = None,
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
        self.reduction = reduction
        self.travel = travel or Travel()
        """How gradients travel, with what was measured for it."""
        self._shared_weights: list[SharedWeight] | None = None
        self.last_step: Spans | None = None
        self._context = context
        self._replica: nn.Module | None = None
        self.compressor: Compressor | None = None
        """What makes gradients smaller for their way, where the strategy says so; known once it was called."""
        self.pulse = Pulse()
        """Where this rank says which pass it is in."""
        self.counting = counting or Counting()
        """Whether the samples of the pass in hand count."""

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The forward pass of this rank's samples, whole on every rank; what comes out is that of its own tokens."""
        if self.pipeline is not None:
            raise ValueError(
                "a pipeline's ranks cannot be called one by one; "
                "use parallel.forward_backward(batches, loss) to train, parallel.forward(batches, finish) to evaluate"
            )
        call = self._given(Call(inputs, options))
        return self.replica(*call.inputs, **call.options)

    def _given(self, call: Call) -> Call:
        """A call with numbers in the dtype that the model computes in."""
        if not self.precision.mixed:
            return call
        return Call(*tree_map_only(Tensor, self._narrowed, (call.inputs, call.options)))

    def _narrowed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision.param) if tensor.is_floating_point() else tensor

    @property
    def replica(self) -> nn.Module:
        """The module that is called; made when it is first needed, since it takes a model that has its memory."""
        if self._replica is None:
            self._replica = self.module
            if self.mesh is not None:
                self._replica, self.compressor = data.wrap_ddp(
                    self.module, self.strategy, self.mesh, self.precision, self.reduction, self.travel
                )
        return self._replica

    def without_ddp(self) -> None:
        """Call the module itself, and sum no gradients of whole parameters: for rehearsals, which have no memory."""
        self._replica = self.module

    @property
    def _shared(self) -> list[SharedWeight]:
        """The weights that this rank shares with one of another stage; found late, since splitting replaces them."""
        if self._shared_weights is None:
            self._shared_weights = shared_weights(self.module, self.pipeline)
        return self._shared_weights

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters as they are stored: DTensors where they are split."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as they are stored, with the names that they have on one device."""
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or out of it."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
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

    def forward_backward(self, batches: Sequence[Batch | Call], loss: Loss) -> None:
        """The forward and backward passes of a step's micro-batches; gradients are reduced over ranks.

        A batch is the model's keyword arguments; `loss(output, index)` gives what gradients are taken of, and is
        called where `has_loss`.
        """
        calls = [as_call(batch) for batch in batches]
        if self.pipeline is None:
            for index, call in enumerate(calls):
                if index:
                    self.pulse.enter("forward")
                with self.micro_step(last=index == len(calls) - 1):
                    loss(self(*call.inputs, **call.options), index).backward()
            return
        if self.strategy.cp > 1 and self.strategy.recompute != "none":
            lengths = {tokens_of(call).shape[1] for call in calls}
            if len(lengths) > 1:
                raise ValueError(
                    f"micro-batches of {sorted(lengths)} tokens: with cp and recompute all of a step must be as long"
                )
        with ExitStack() as sums:
            for weight in self._shared:
                sums.enter_context(weight.summed())
            data.accumulate(self.module, self.strategy.zero)
            self.last_step = self.pipeline.forward_backward([self._given(call) for call in calls], loss, self.pulse)
            data.reduce(self.module)

    def passes(self, loss_of: LossOf, micro_batches: Sequence[Any]) -> list[Tensor]:
        """The forward and backward passes of a step's micro-batches under a loss that calls the model itself, once:
        `loss_of(model, micro_batch)`. Gives the losses, without their graphs, where `has_loss`; elsewhere nothing.

        On the ranks of a pipeline it is left where it calls the model, and called again where the output is.
        """
        if self.pipeline is not None:
            loss = OwnLoss(self, loss_of, micro_batches)
            self.forward_backward(loss.calls, loss)
            return loss.found
        found = []
        for index, micro_batch in enumerate(micro_batches):
            if index:
                self.pulse.enter("forward")
            with self.micro_step(last=index == len(micro_batches) - 1):
                one = loss_of(self, micro_batch)
                one.backward()
            found.append(one.detach())
        return found

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
        sent, self.compressor.sent = self.compressor.sent, 0
        return sent, self.compressor.whole(numbers)

    def bubble(self) -> Bubble | None:
        """How much of the last step's passes the ranks of the pipeline waited; None without one. All ranks must ask."""
        if self.pipeline is None or self.last_step is None or self.stages is None:
            return None
        program = self.pipeline.program(self.last_step.micro_batches)
        return bubble_of(program, *self.last_step.times(), self.stages, next(self.parameters()).device)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch | Call], finish: Callable[[Any, int], Result]) -> list[Result]:
        """What `finish(output, index)` gives for the output of each batch, where `has_loss`; elsewhere nothing."""
        calls = [self._given(as_call(batch)) for batch in batches]
        if self.pipeline is not None:
            return self.pipeline.forward(calls, finish, self.pulse)
        return [finish(self.module(*call.inputs, **call.options), index) for index, call in enumerate(calls)]

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
        return [shared.weight for shared in self._shared if not shared.counts]

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
