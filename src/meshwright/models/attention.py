"""Causal self-attention by heads: grouped queries, rotary positions, optional QK norm and sliding window.

Shapes: B batch, T tokens, S tokens attended to, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.models.attention_kernels import attend_with_kernel, takes_blocks
from meshwright.models.document_attention import Sight, attend_by_blocks, seen_blocks
from meshwright.models.linear import Linear, linears
from meshwright.models.norms import RMSNorm
from meshwright.models.rope import rotate
from meshwright.models.spec import ModelSpec

Documents = Tensor | Sight | None
"""The number of the document of each position, or what follows from these by blocks of tokens."""
Attend = Callable[[Tensor, Tensor, Tensor, int | None, Documents], Tensor]
"""What `attend` below takes and gives."""


class KeyValueCache:
    """Keys and values of the tokens seen so far, per layer; for generation only."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """How many tokens are in the cache."""
        return next(iter(self._layers.values()))[0].shape[2] if self._layers else 0

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; gives all of them."""
        if layer in self._layers:
            k_past, v_past = self._layers[layer]
            k_BHTD, v_BHTD = torch.cat((k_past, k_BHTD), dim=2), torch.cat((v_past, v_BHTD), dim=2)
        self._layers[layer] = (k_BHTD, v_BHTD)
        return k_BHTD, v_BHTD


class Attention(nn.Module):
    """Self-attention of one layer; parameter names are Hugging Face's `self_attn`."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.sliding_window = spec.sliding_window
        query_size, key_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, query_size, bias="q" in spec.bias)
        self.k_proj = Linear(spec.hidden_size, key_size, bias="k" in spec.bias)
        self.v_proj = Linear(spec.hidden_size, key_size, bias="v" in spec.bias)
        self.o_proj = Linear(query_size, spec.hidden_size, bias="o" in spec.bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps)
        self.qk_norm = spec.qk_norm
        # Replaced from outside where the tokens of a sequence are split.
        self.attend: Attend = attend

    def forward(
        self,
        x_BTE: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        documents: Documents = None,
    ) -> Tensor:
        # No names for queries, keys and values: what attention does not keep is gone before the output projection.
        y_BHTD = self.attend(*self._heads(x_BTE, rope, cache), self.sliding_window, documents)
        return self.o_proj(y_BHTD.transpose(1, 2).flatten(2))

    def _heads(
        self, x_BTE: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of these tokens, keys and values of all that there are."""
        q, k, v = (
            y_BTE.unflatten(-1, (-1, self.head_dim)) for y_BTE in linears(x_BTE, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTD, k_BHTD, v_BHTD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rope is not None:
            q_BHTD, k_BHTD = rotate(q_BHTD, *rope), rotate(k_BHTD, *rope)
        if cache is not None:
            k_BHTD, v_BHTD = cache.extend(self.layer, k_BHTD, v_BHTD)
        return q_BHTD, k_BHTD, v_BHTD


def attend(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    sliding_window: int | None = None,
    documents: Documents = None,
) -> Tensor:
    """Causal attention of the last T of S positions over all S, with as many query heads per KV head as it takes.

    With `documents`, the number of the document of each position (B, S), it stays within a document.
    """
    tokens, attended = q_BHTD.shape[2], k_BHSD.shape[2]
    windowed = sliding_window is not None and attended > sliding_window
    if not windowed and documents is None and tokens in (attended, 1):
        causal = tokens == attended and tokens > 1
        return attend_with_kernel(q_BHTD, k_BHSD, v_BHSD, causal=causal)
    if tokens == attended > 1 and takes_blocks(q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[-1]):
        if isinstance(documents, Sight):
            assert documents.window == sliding_window
            blocks = documents.blocks
        else:
            blocks = seen_blocks(attended, sliding_window, documents, q_BHTD.device)
        return attend_by_blocks(q_BHTD, k_BHSD, v_BHSD, blocks)
    documents_BS = documents.documents_BT if isinstance(documents, Sight) else documents
    query = torch.arange(attended - tokens, attended, device=q_BHTD.device)[:, None]
    key = torch.arange(attended, device=q_BHTD.device)[None, :]
    mask_TS = key <= query
    if windowed:
        assert sliding_window is not None
        mask_TS = mask_TS & (key > query - sliding_window)
    if documents_BS is not None:
        mask_TS = mask_TS & (documents_BS[:, None, -tokens:, None] == documents_BS[:, None, None, :])
    return attend_with_kernel(q_BHTD, k_BHSD, v_BHSD, mask=mask_TS)
