"""Context parallel: every sequence's tokens are split over the ranks of one axis, which attend to each other's.

The model is called with whole sequences on every rank; a wrapper around its forward pass leaves it this rank's tokens
and their positions, and logits come out for those. Attention is the one place where tokens meet: modules that attend
do so through their attribute `attend`, which is replaced here. `context_layout` says who has which tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.axis_order import AXES
from meshwright.context_layout import ContextLayout
from meshwright.errors import ConfigError
from meshwright.models.attention import Documents, attend
from meshwright.models.document_attention import Sight
from meshwright.models.reads import Forward, around_forward
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.ring_attention import ring_attention
from meshwright.parallel.ulysses import join_heads, split_heads


class Context:
    """The ranks that split every sequence, seen from one of them."""

    def __init__(self, layout: ContextLayout, mesh: Mesh) -> None:
        self.layout = layout
        self.rank = mesh["cp"].get_local_rank()
        self.ring, self.members = _groups(layout, mesh)
        self.length: int | None = None
        """Of the sequences in hand; None where they are not split."""

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """This rank's part of something that is known of all tokens; they are the last dimension."""
        length = x_BT.shape[-1]
        if not self.layout.fits(length):
            nearest = " or ".join(map(str, self.layout.nearest_lengths(length)))
            raise ValueError(f"a sequence of {length} tokens leaves one of {len(self)} ranks without; use {nearest}")
        return x_BT[..., torch.tensor(self.layout.positions(length, self.rank), device=x_BT.device)]

    def __len__(self) -> int:
        return self.layout.ring * self.layout.heads

    def forward(
        self,
        inner: Forward,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        *rest: Any,
        cache: object = None,
        **options: Any,
    ) -> Tensor:
        """A model's forward pass over this rank's tokens. What goes into a cache is not split."""
        if cache is not None:
            self.length = None
            return inner(tokens_BT, positions_BT, *rest, cache=cache, **options)
        self.length = tokens_BT.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(self.length, device=tokens_BT.device)[None]
        return inner(self.own_tokens(tokens_BT), self.own_tokens(positions_BT), *rest, **options)

    def attend(
        self,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        sliding_window: int | None = None,
        documents: Documents = None,
    ) -> Tensor:
        """Attention of this rank's tokens to those of all ranks; `documents` are those of whole sequences."""
        if self.length is None:
            return attend(q_BHTD, k_BKTD, v_BKTD, sliding_window, documents)
        if isinstance(documents, Sight):
            # Its blocks are those of this rank's tokens, as if they were all.
            documents = documents.documents_BT
        place = self.rank // self.layout.heads
        lengths = self.layout.part_lengths(self.length)[place * self.layout.heads :][: self.layout.heads]
        if self.members is not None:
            q_BHTD, k_BKTD, v_BKTD = split_heads(q_BHTD, k_BKTD, v_BKTD, lengths, self.members)
        if self.ring is not None:
            y_BHTD = ring_attention(q_BHTD, k_BKTD, v_BKTD, self.ring, self.length, sliding_window, documents)
        else:
            y_BHTD = attend(q_BHTD, k_BKTD, v_BKTD, sliding_window, documents)
        return y_BHTD if self.members is None else join_heads(y_BHTD, lengths, self.members)


def _groups(layout: ContextLayout, mesh: Mesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks of this one's ring, and those that share its place in it; None for a rank alone."""
    if layout.heads == 1:
        return mesh["cp"].get_group(), None
    if layout.ring == 1:
        return None, mesh["cp"].get_group()
    ranks = mesh.axes.mesh.movedim(AXES.index("cp"), -1).reshape(-1, layout.ring, layout.heads)
    both = DeviceMesh(mesh.axes.device_type, ranks, mesh_dim_names=("others", "ring", "members"))
    return both.get_group("ring"), both.get_group("members")


def check(model: nn.Module) -> None:
    """Raise a ConfigError unless the model attends in a way that can be replaced."""
    if not _attending(model):
        raise ConfigError(
            f"cp needs to know where {type(model).__name__} attends: let its attention modules call an attribute "
            "`attend` (docs/strategies.md says with what), or use cp=1"
        )


def apply(model: nn.Module, layout: ContextLayout, mesh: Mesh) -> Context:
    """Split a model's sequences over the cp axis."""
    context = Context(layout, mesh)
    for module in _attending(model):
        module.attend = context.attend
    around_forward(model, context.forward)
    return context


def _attending(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "attend")]
