"""Attention within documents and sliding windows on GPUs: what lies outside is left out by blocks, not masked.

A boolean mask of all pairs of tokens takes T x T bytes a sample, and kernels that take one compute all pairs. Flex
attention is given which blocks of 128 x 128 pairs are seen in whole, which in part and by what rule, and becomes one
kernel for documents, windows and grouped queries. (Flash attention for packed sequences does documents as well, but
wants their number, which differs from batch to batch, as a shape.)

The blocks depend on the batch alone: the decoder makes them once for all its layers. They follow from the least and
the largest document number in each block of tokens, so that no pair of tokens is looked at. That may count a block as
seen in part of which nothing is seen, where document numbers go up and down; the rule then decides.

Inside of a compiled layer the kernel is part of it; elsewhere it is compiled alone, never run in pieces. On CPUs there
is no gradient of it: `attention.attend` masks there, which is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from meshwright.models.attention_kernels import takes_blocks
from meshwright.torch_private import without_modes

BLOCK = 128
FORMS = 64
"""Shapes, dtypes and rules for which a process compiles the kernel alone; one more is an error."""


@dataclass(frozen=True)
class Sight:
    """What each token of a batch sees: of a window, of its document, and that by blocks."""

    window: int | None
    documents_BT: Tensor | None
    blocks: BlockMask


def look_ahead(
    documents_BT: Tensor | None, length: int, window: int | None, hidden_BTC: Tensor, head_size: int
) -> Tensor | Sight | None:
    """What all layers can share of attention within `documents` and a window, where a kernel wants it by blocks.

    `documents` as they are where it does not, or where they are those of more tokens than the ones in hand.
    """
    limited = documents_BT is not None or (window is not None and window < length)
    whole = documents_BT is None or documents_BT.shape[1] == length
    if limited and whole and length > 1 and takes_blocks(hidden_BTC.device, hidden_BTC.dtype, head_size):
        return Sight(window, documents_BT, seen_blocks(length, window, documents_BT, hidden_BTC.device))
    return documents_BT


def attend_by_blocks(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, blocks: BlockMask) -> Tensor:
    """Attention to what is seen by blocks; K key-value heads for H query heads."""
    grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
    if torch.compiler.is_compiling():
        return _tensor(flex_attention(q_BHTD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=grouped))
    # What follows operations, as selective recomputation does, would keep the compiler away.
    with without_modes():
        return _tensor(_alone()(q_BHTD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=grouped))


@cache
def _alone() -> Callable[..., Any]:
    # In one piece, or an error: what it runs as otherwise holds all scores.
    compiled = torch.compile(flex_attention, fullgraph=True)
    return torch._dynamo.config.patch(recompile_limit=FORMS)(compiled)


def _tensor(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def seen_blocks(length: int, window: int | None, documents_BT: Tensor | None, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries sees, in whole or in part; causal."""
    first = torch.arange(0, length, BLOCK, device=device)
    last = first + BLOCK - 1
    query, key = (first[:, None], last[:, None]), (first[None], last[None])
    some, all_ = key[0] <= query[1], key[1] <= query[0]
    # As PyTorch has it: a block that the sequence does not fill is one seen in part.
    all_ = all_ & (query[1] < length)
    if window is not None:
        some, all_ = some & (key[1] > query[0] - window), all_ & (key[0] > query[1] - window)
    some, all_ = some[None], all_[None]
    if documents_BT is not None:
        least, most = _range_by_block(documents_BT)
        some = some & (least[:, None, :] <= most[:, :, None]) & (least[:, :, None] <= most[:, None, :])
        one = least == most
        all_ = all_ & one[:, None, :] & one[:, :, None] & (least[:, None, :] == least[:, :, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~all_),
        *_listed(some & all_),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(window, documents_BT),
        seq_lengths=(length, length),
    )


def _range_by_block(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number of a document in each block of tokens."""
    missing = -documents_BT.shape[1] % BLOCK
    if missing:
        documents_BT = torch.cat((documents_BT, documents_BT[:, -1:].expand(-1, missing)), dim=1)
    return torch.aminmax(documents_BT.unflatten(1, (-1, BLOCK)), dim=2)


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks there are in each row, and where, these before the others; for all heads alike."""
    blocks = blocks_BQK[:, None].to(torch.int32)
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def _rule(window: int | None, documents_BT: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, by their positions: the same words as in `attention.attend`."""

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = key <= query
        if window is not None:
            found = found & (key > query - window)
        if documents_BT is not None:
            found = found & (documents_BT[sample, query] == documents_BT[sample, key])
        return found

    return seen
