"""Ring attention: keys and values travel from rank to rank, and every rank's queries meet all of them in turn.

Each step attends to one rank's keys while the next one's are on their way; the steps' outputs are merged by their
log-sum-exp. Going backward, keys and values travel once more, and their gradients follow one step behind, each rank
adding its part, until they are home.

Of a step's keys and queries only those are used that can meet under the causal mask. With the zigzag of
`context_layout` that is one kernel call without a mask: a rank before this one is met with its first chunk, one after
it by this rank's second chunk, and all steps are of one size. What travels goes from rank to rank downwards, so that
it meets first those who need all of it; from there on only the first chunk goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transfers import Message, exchange
from meshwright.context_layout import ContextLayout
from meshwright.parallel.attention_blocks import attend_block, attend_block_backward
from meshwright.torch_private import resolve_group


@dataclass(frozen=True)
class _Block:
    """What of this rank's queries and of another's keys meets in a step."""

    queries: slice
    keys: slice
    causal: bool
    mask_BTS: Tensor | None


@dataclass
class _Arriving:
    """Something on its way, while something else leaves."""

    tensor: Tensor
    message: Message

    def wait(self) -> Tensor:
        self.message.wait()
        return self.tensor


class _Ring:
    """The ranks of a ring around one of them, for a sequence of some length."""

    def __init__(self, group: str, length: int, window: int | None, documents_BT: Tensor | None) -> None:
        self.group = resolve_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.layout, self.length = ContextLayout(self.size, 1), length
        self.window = window if window is not None and window < length else None
        self.documents_BT = documents_BT

    def source(self, step: int) -> int:
        """Whose keys are here in a step; 0 is this rank's own."""
        return (self.rank + step) % self.size

    def pass_keys(self, held_T: Tensor, step: int) -> _Arriving:
        """Send on what the next rank needs of what is here in a step, and receive what this one needs in the next."""
        sent = self._needed(self.source(step), (self.rank - 1) % self.size)
        return self._pass_on(held_T[:sent], self._needed(self.source(step + 1), self.rank))

    def pass_gradients(self, gradients_T: Tensor, step: int) -> _Arriving:
        """Send on gradients of all keys of which some are here in a step, and receive those for the next."""
        return self._pass_on(gradients_T, self.tokens(self.source(step + 1)))

    def _pass_on(self, outgoing: Tensor, tokens: int) -> _Arriving:
        tensor = outgoing.new_empty(tokens, *outgoing.shape[1:])
        to, origin = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        return _Arriving(tensor, exchange(outgoing, to, tensor, origin, self.group))

    def block(self, step: int, device: torch.device) -> _Block:
        """What meets in a step; there may be no queries in it."""
        source, mine = self.source(step), self.tokens(self.rank)
        queries, keys = slice(0, mine), slice(0, self._needed(source, self.rank))
        if source > self.rank:
            queries = slice(self._first_chunk(self.rank), mine)
        if self.window is None and self.documents_BT is None:
            return _Block(queries, keys, source == self.rank, None)
        return _Block(queries, keys, False, self._mask(queries, source, keys, device))

    def _mask(self, queries: slice, source: int, keys: slice, device: torch.device) -> Tensor:
        query, key = (
            torch.tensor(self.layout.place_positions(self.length, place)[where], dtype=torch.int64, device=device)
            for place, where in ((self.rank, queries), (source, keys))
        )
        mask_BTS = (key <= query[:, None])[None]
        if self.window is not None:
            mask_BTS = mask_BTS & (key > query[:, None] - self.window)
        if self.documents_BT is not None:
            mask_BTS = mask_BTS & (self.documents_BT[:, query, None] == self.documents_BT[:, None, key])
        return mask_BTS

    def tokens(self, place: int) -> int:
        """How many tokens a rank has."""
        return sum(chunk.stop - chunk.start for chunk in self.layout.chunks(self.length, place))

    def _needed(self, source: int, rank: int) -> int:
        """With how many tokens of a source, the first ones, a rank's queries can meet."""
        return self._first_chunk(source) if source < rank else self.tokens(source)

    def _first_chunk(self, place: int) -> int:
        first, _ = self.layout.chunks(self.length, place)
        return first.stop - first.start


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group: str, length: int, window: int | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output of this rank's queries, and the log-sum-exp of their scores."""
    ring = _Ring(group, length, window, documents)
    held, out, lse = _pack(k, v), q, q
    for step in range(ring.size):
        arriving = ring.pass_keys(held, step) if step < ring.size - 1 else None
        block = ring.block(step, q.device)
        keys, values = _unpack(held)
        found = attend_block(q[:, :, block.queries], keys, values, causal=block.causal, mask_BTS=block.mask_BTS)
        if step == 0:
            # In the dtype of the log-sum-exp, so that merging rounds nothing off.
            out, lse = found[0].to(found[1].dtype), found[1]
        else:
            _merge(out[:, :, block.queries], lse[:, :, block.queries], *found)
        if arriving is not None:
            held = arriving.wait()
    return out.to(q.dtype), lse


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as they travel: (tokens, 2, batch, KV heads, head size); the first tokens lie together."""
    return torch.stack((k.movedim(2, 0), v.movedim(2, 0)), dim=1)


def _unpack(held: Tensor) -> Tensor:
    """Both of them, each as (batch, KV heads, tokens, head size)."""
    return held.movedim(0, 3)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to what there is, in place."""
    merged = torch.logaddexp(lse, block_lse)
    # A query that has met no key yet has a log-sum-exp of -inf on both sides.
    base = merged.nan_to_num(neginf=0.0)
    out.mul_((lse - base).exp_()[..., None])
    out.add_(block_out.to(out.dtype).mul_((block_lse - base).exp_()[..., None]))
    lse.copy_(merged)


def ring_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    length: int,
    window: int | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values."""
    ring = _Ring(group, length, window, documents)
    dq = torch.empty_like(q, dtype=lse.dtype)
    # One half of the heads after the other, where they can be halved: what is on its way takes half the memory.
    rounds = 1 if k.shape[1] % 2 else 2
    of_keys_and_values = [
        _round_backward(ring, *heads)
        for heads in zip(*(x.chunk(rounds, dim=1) for x in (gradient, q, k, v, out, lse, dq)), strict=True)
    ]
    dk, dv = torch.cat([_unpack(part) for part in of_keys_and_values], dim=2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _round_backward(
    ring: _Ring, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor
) -> Tensor:
    """Fills in the gradients of some heads' queries, and gives those of their keys and values."""
    held = _pack(k, v)
    following: _Arriving | None = None
    for step in range(ring.size):
        arriving = ring.pass_keys(held, step) if step < ring.size - 1 else None
        block = ring.block(step, q.device)
        keys, values = _unpack(held)
        of_block, *of_keys_and_values = attend_block_backward(
            gradient[:, :, block.queries],
            q[:, :, block.queries],
            keys,
            values,
            out[:, :, block.queries],
            lse[:, :, block.queries],
            causal=block.causal,
            mask_BTS=block.mask_BTS,
        )
        if following is None:
            dq.copy_(of_block)
            gradients = _pack(*of_keys_and_values).to(lse.dtype)
        else:
            dq[:, :, block.queries] += of_block
            gradients = following.wait()
            for whole, part in zip(_unpack(gradients), of_keys_and_values, strict=True):
                whole[:, :, block.keys] += part
        # What has been added up goes before more comes.
        del of_block, of_keys_and_values
        following = ring.pass_gradients(gradients, step)
        if arriving is not None:
            held = arriving.wait()
    assert following is not None
    return following.wait()


_SCHEMA = "(Tensor q, Tensor k, Tensor v, str group, int length, int? window, Tensor? documents) -> (Tensor, Tensor)"

# An operation of PyTorch, so that selective recomputation keeps its result and does not take it apart.
_ring_attention = torch.library.custom_op("meshwright::ring_attention", ring_forward, mutates_args=(), schema=_SCHEMA)
RING_ATTENTION = torch.ops.meshwright.ring_attention.default


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
        out, lse = _ring_attention(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = where
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ring_backward(gradients[0], *ctx.saved_tensors, *ctx.where), *(None for _ in ctx.where)


def ring_attention(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    group: dist.ProcessGroup,
    length: int,
    window: int | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks; `documents` are those of the whole sequence."""
    return _RingAttention.apply(q_BHTD, k_BKTD, v_BKTD, group.group_name, length, window, documents_BT)
