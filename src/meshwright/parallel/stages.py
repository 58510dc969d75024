"""Cut a decoder down to the stages of one pipeline rank: the same module with layers removed, so that names survive.

Parameters that stages on two ranks share, such as tied embeddings, live on both. Both get the sum of their gradients
and so make the same updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.transfers import receive, send
from meshwright.context_layout import ContextLayout
from meshwright.models.decoder import Decoder
from meshwright.models.parts import local_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import Call, Pipeline, Shared
from meshwright.schedules import stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy


class DecoderStages:
    """A decoder, called with the layers of one of its stages."""

    def __init__(self, model: Decoder, strategy: Strategy, mesh: Mesh, dtype: torch.dtype) -> None:
        self.layers = stage_layers(model.spec, strategy.pp * stages_per_rank(strategy.schedule), strategy.layers)
        self.everywhere: set[str] = set()
        self.first_layer: nn.Module | None = model.model.layers["0"]
        tied = model.spec.tie_word_embeddings
        self.shared = [Shared("model.embed_tokens.weight", (0, len(self.layers) - 1))] if tied else []
        self._model = model
        self._strategy = strategy
        self._dtype = dtype
        self._context = ContextLayout.of(strategy.cp, strategy.cp_method), mesh["cp"].get_local_rank()

    def run(self, stage: int, call: Call, hidden: Tensor | None) -> Any:
        """What the layers of the stage make of what those before gave."""
        return self._model(*call.inputs, **call.options, hidden_BTC=hidden, layers=self.layers[stage])

    def border(self, stage: int, call: Call) -> Tensor:
        """An empty tensor like what goes from layer to layer."""
        tokens_BT = tokens_of(call)
        layout, rank = self._context
        samples, tokens = tokens_BT.shape
        if call.options.get("cache") is None:
            tokens = layout.part_lengths(tokens)[rank]
        if self._strategy.sp and tokens % self._strategy.tp == 0:
            tokens //= self._strategy.tp
        width = self._model.spec.hidden_size
        return torch.empty(samples, tokens, width, dtype=self._dtype, device=tokens_BT.device)

    def keep(self, stages: Sequence[int]) -> None:
        """Remove from the model what belongs to other stages than these."""
        model, tied = self._model, self._model.spec.tie_word_embeddings
        kept = {str(layer) for stage in stages for layer in self.layers[stage]}
        for name in list(model.model.layers):
            if name not in kept:
                del model.model.layers[name]
        has_first, has_last = 0 in stages, len(self.layers) - 1 in stages
        if not has_first:
            self.first_layer = None
            # The head of a tied model keeps its weight under the embedding's name.
            if not (has_last and tied):
                model.model.embed_tokens = None  # type: ignore[assignment]
            if model.spec.positions == "learned":
                model.model.embed_positions = None  # type: ignore[assignment]
        if not has_last:
            model.model.norm = None  # type: ignore[assignment]
            model.lm_head = None  # type: ignore[assignment]

    def blocks(self, blocks: Sequence[nn.Module], stages: Sequence[int]) -> list[list[nn.Module]]:
        """Of all layers those of these stages."""
        return [[blocks[layer] for layer in self.layers[stage]] for stage in stages]

    def check_wrapped(self, modules: Sequence[nn.Module], wrap: str) -> None:
        """Any of its modules may be gathered by itself."""


def tokens_of(call: Call) -> Tensor:
    """The token ids of a call of the decoder."""
    found: Tensor = call.options["tokens_BT"] if "tokens_BT" in call.options else call.inputs[0]
    return found


class SharedWeight:
    """A weight that stages on two ranks both hold, seen from one of them."""

    def __init__(self, weight: nn.Parameter, other: int, counts: bool, group: dist.ProcessGroup) -> None:
        self.weight = weight
        self.other = other
        """The other rank in the pipeline's group."""
        self.counts = counts
        """Whether this rank's copy counts where the whole model is added up."""
        self._group = group

    @contextmanager
    def summed(self) -> Iterator[None]:
        """The context of a step's passes: what they give is summed, what was there before is not summed again."""
        before, self.weight.grad = self.weight.grad, None
        yield
        if self.weight.requires_grad:
            self.sum_gradients()
        if before is not None:
            self.weight.grad = before if self.weight.grad is None else self.weight.grad + before

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the other rank's gradient to this one's."""
        if self.weight.grad is None:
            raise ValueError(
                "a weight that two stages share has got no gradient on one of them: a model that was given memory "
                "(to_empty) after mw.parallelize must be tied again"
            )
        own = local_of(self.weight.grad)
        sent, theirs = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        # One after the other, and not as a batch: to NCCL a batch is a matter of all ranks of the group.
        for sends in (self.counts, not self.counts):
            if sends:
                send(sent, self._group, self.other).wait()
            else:
                receive(theirs, self._group, self.other).wait()
        own.add_(theirs)


def shared_weights(model: nn.Module, pipeline: Pipeline | None) -> list[SharedWeight]:
    """The weights that this rank shares with another one of its pipeline."""
    found = []
    named = dict(model.named_parameters()) if pipeline is not None and pipeline.cut.shared else {}
    for name, stages in pipeline.cut.shared if pipeline is not None else ():
        assert pipeline is not None
        ranks = list(dict.fromkeys(pipeline.placement[stage] for stage in stages))
        if len(ranks) > 1 and pipeline.rank in ranks:
            (other,) = (rank for rank in ranks if rank != pipeline.rank)
            found.append(SharedWeight(named[name], other, pipeline.rank == ranks[0], pipeline.group))
    return found
