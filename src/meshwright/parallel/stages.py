"""Cut a decoder down to the stages of one pipeline rank: the same module with layers removed, so that names survive.

Tied embeddings live on the ranks of the first and of the last stage. Both get the sum of their gradients and so make
the same updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm.transfers import receive, send
from meshwright.models.decoder import Decoder
from meshwright.models.parts import local_of


def keep_stages(model: Decoder, layers: Sequence[range], stages: Sequence[int]) -> None:
    """Remove from a model what belongs to other stages than these."""
    kept = {str(layer) for stage in stages for layer in layers[stage]}
    for name in list(model.model.layers):
        if name not in kept:
            del model.model.layers[name]
    has_first, has_last = 0 in stages, len(layers) - 1 in stages
    if not has_first:
        # The head of a tied model keeps its weight under the embedding's name.
        if not (has_last and model.spec.tie_word_embeddings):
            model.model.embed_tokens = None  # type: ignore[assignment]
        if model.spec.positions == "learned":
            model.model.embed_positions = None  # type: ignore[assignment]
    if not has_last:
        model.model.norm = None  # type: ignore[assignment]
        model.lm_head = None  # type: ignore[assignment]


class TiedEmbedding:
    """The weight that the ranks of the first and of the last stage both hold, seen from one of them."""

    def __init__(self, weight: nn.Parameter, other: int, counts: bool, group: dist.ProcessGroup) -> None:
        self.weight = weight
        self.other = other
        """The other rank in the pipeline's group."""
        self.counts = counts
        """Whether this rank's copy counts where the whole model is added up."""
        self._group = group

    @contextmanager
    def shared(self) -> Iterator[None]:
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
        assert self.weight.grad is not None
        own = local_of(self.weight.grad)
        sent, theirs = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        # One after the other, and not as a batch: to NCCL a batch is a matter of all ranks of the group.
        for sends in (self.counts, not self.counts):
            if sends:
                send(sent, self._group, self.other).wait()
            else:
                receive(theirs, self._group, self.other).wait()
        own.add_(theirs)
