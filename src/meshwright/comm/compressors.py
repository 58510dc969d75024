"""Sums of gradients over ranks that send less than the gradients: the kinds of `compression`, as running code.

A compressor gets a bucket of gradients, the same parameters on every rank, and puts (nearly) their sum over ranks in
its place, the same bits on all ranks. It asks the host for nothing, so that a GPU is not waited for.

Where it remembers what it did not send (`unsent`), a gradient that is no number reaches all ranks as such, and leaves
what is remembered as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.compression import BLOCK, Compression
from meshwright.comm.sums import Sum
from meshwright.models.counter_random import key_of, normal
from meshwright.parallel.torch_releases import all_gather_into


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    flat: Tensor
    """All of them in one row."""
    gradients: Sequence[Tensor]
    """Views of it, in the shapes of their parameters."""
    names: Sequence[str]


def sum_in(dtype: torch.dtype, flat: Tensor, total: Callable[[Tensor], object]) -> None:
    """Put the sum over ranks, made in a dtype that gradients may not have, in the place of gradients."""
    sent = flat.to(dtype)
    total(sent)
    flat.copy_(sent)


class Compressor(ABC):
    """One kind of compression on one rank."""

    def __init__(self, how: Compression, group: dist.ProcessGroup, total: Sum, dtype: torch.dtype) -> None:
        self.how, self.group, self._total = how, group, total
        self._dtype = dtype
        self.whole_steps = 0
        """Steps in which gradients travel as they are, before the first that is compressed."""
        self.steps = 0
        """That are done."""
        self._travelled = False
        """Whether gradients of the step in hand are under way, or were."""
        self.sent = 0
        """Bytes that this rank has sent; for gathers and exchanges those of rings."""
        self.unsent: dict[str, Tensor] = {}
        """By parameter: what this rank has not sent yet; that of all ranks together belongs to the gradient."""
        self.bases: dict[str, Tensor] = {}
        """By parameter: the directions that its last gradient went in, the same on all ranks."""

    def __call__(self, bucket: Bucket) -> None:
        """Put the sum over ranks in the place of the bucket's gradients."""
        self._travelled = True
        if self.steps < self.whole_steps:
            sum_in(self._dtype, bucket.flat, self.sum)
        else:
            self.reduce(bucket)

    def begin_step(self, step: int) -> None:
        """So many steps are done, and the next one comes."""
        self.steps, self._travelled = step, False

    @property
    def steps_done(self) -> int:
        """Of which gradients have travelled."""
        return self.steps + self._travelled

    def begin_pass(self) -> None:
        """A forward pass: once gradients have travelled it is one of the next step."""
        if self._travelled:
            self.begin_step(self.steps + 1)

    @abstractmethod
    def reduce(self, bucket: Bucket) -> None:
        """The same, compressed."""

    def sum(self, tensor: Tensor) -> None:
        """Put the sum over ranks in the place of a tensor."""
        self.sent += self._total(tensor)

    def whole(self, numbers: int) -> int:
        """Bytes that this rank would send for so many gradients as they are."""
        return self._total.sent(numbers, self._dtype.itemsize)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, in rows."""
        ranks = self.group.size()
        everyone = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        all_gather_into(everyone, tensor.view(-1), group=self.group)
        self.sent += (ranks - 1) * tensor.nbytes
        return everyone.view(ranks, -1)

    def exchange(self, rows: Tensor) -> Tensor:
        """What the ranks have for this one, in rows; each rank gives a row for each."""
        incoming = torch.empty_like(rows)
        dist.all_to_all_single(incoming, rows, group=self.group)
        self.sent += rows.nbytes // len(rows) * (len(rows) - 1)
        return incoming

    def forget(self) -> None:
        """Drop what was not sent: after a step that is not learned from, part of what is there is that step's."""
        for rest in self.unsent.values():
            rest.zero_()

    def remembers(self, shape: Sequence[int]) -> bool:
        """Whether something of a parameter of that shape may be left over."""
        return self.how.kind == "topk" or self.how.factored(shape) is not None

    def _room(self, bucket: Bucket) -> list[Tensor]:
        """What was not sent of a bucket's gradients; nothing at first."""
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            if name not in self.unsent:
                self.unsent[name] = torch.zeros(gradient.shape, dtype=_wide(gradient.dtype), device=gradient.device)
        return [self.unsent[name] for name in bucket.names]


class Narrow(Compressor):
    """Sums in 16 bits. In fp16 they are scaled, alike on all ranks, so that none is too large and few are too small."""

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {"fp16": torch.float16, "bf16": torch.bfloat16}

    def reduce(self, bucket: Bucket) -> None:
        flat, dtype = bucket.flat, self.DTYPES[self.how.kind]
        if dtype == torch.bfloat16:
            sum_in(dtype, flat, self.sum)
            return
        largest = _extent(flat).float() if flat.numel() else torch.zeros((), device=flat.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        # A power of two loses nothing; sums stay within half of the largest number of fp16.
        room = torch.finfo(dtype).max / 2 / self.group.size()
        scale = torch.exp2(torch.floor(torch.log2(room / largest.clamp(min=1e-30))))
        scale = torch.where(largest.isfinite(), scale, torch.ones_like(scale)).clamp(max=2.0**60)
        sum_in(dtype, flat.mul_(scale), self.sum)
        flat.div_(scale)


class Eight(Compressor):
    """In 8 bits with a scale for every block: each rank sums one part of the bucket in full, and all get the sums."""

    def reduce(self, bucket: Bucket) -> None:
        flat, ranks = bucket.flat, self.group.size()
        blocks = -(-flat.numel() // (BLOCK * ranks))
        rows = torch.zeros(ranks * blocks, BLOCK, dtype=torch.float32, device=flat.device)
        rows.view(-1)[: flat.numel()].copy_(flat)
        codes = _encode(rows).view(ranks, -1)
        # Memory of gradients is dear while a backward pass goes on: nothing stays longer than it is needed.
        del rows
        incoming = self.exchange(codes)
        del codes
        total = _decode(incoming, blocks).view(ranks, -1).sum(dim=0)
        del incoming
        everyone = self.gather(_encode(total.view(blocks, BLOCK)))
        del total
        flat.copy_(_decode(everyone, blocks).view(-1)[: flat.numel()])


def _extent(numbers: Tensor, **options: Any) -> Tensor:
    """How far from zero the farthest number is; no number where one is none."""
    return torch.maximum(numbers.amax(**options), -numbers.amin(**options))


def _encode(rows: Tensor) -> Tensor:
    """Rows in 8 bits each, as bytes: of each its codes, then its scale; no number where something in it is none.

    What is left in the rows is of no use.
    """
    scales = _extent(rows, dim=1, keepdim=True) / 127
    codes = rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)


def _decode(parts: Tensor, blocks: int) -> Tensor:
    """The rows of bytes as numbers."""
    rows = parts.view(len(parts) * blocks, -1)
    scales = rows[:, BLOCK:].contiguous().view(torch.float32)
    return rows[:, :BLOCK].contiguous().view(torch.int8).float().mul_(scales)


class TopK(Compressor):
    """The largest numbers with their places; the rest waits for the next step."""

    def reduce(self, bucket: Bucket) -> None:
        flat, unsent = bucket.flat, self._room(bucket)
        row = torch.cat([one.view(-1) for one in unsent]).add_(flat)
        sizes = [one.numel() for one in unsent]
        # Parameter by parameter: in some of them all gradients are smaller than in others, and they learn as well.
        starts = accumulate(sizes, initial=0)
        found = [
            largest(part, self.how.kept(len(part))) + start
            for part, start in zip(row.split(sizes), starts, strict=False)
        ]
        places = torch.cat(found)
        values = row[places]
        # Values and places in one message.
        sent = torch.cat((values.view(torch.int32), places.to(torch.int32)))
        total, split = torch.zeros_like(row), sent.numel() - len(places)
        # One rank after the other, so that all add up in the same order.
        for one in self.gather(sent):
            total.index_add_(0, one[split:].long(), one[:split].clone().view(values.dtype))
        flat.copy_(total)
        rest, fine = row.index_fill_(0, places, 0.0), _extent(total).isfinite()
        for kept, part in zip(unsent, rest.split(sizes), strict=True):
            torch.where(fine, part.view_as(kept), kept, out=kept)


def largest(row: Tensor, count: int) -> Tensor:
    """Places of the numbers that are farthest from zero; those that are no numbers count as such."""
    size = row.abs()
    if row.device.type == "cpu" and 0 < count * 8 < row.numel() and row.numel() > 4096:
        # Few can be among them: those above what a sample says that a few more than wanted are above.
        step = max(1, row.numel() // 65536)
        sample = size[::step]
        wanted = min(len(sample), int(1.2 * count * len(sample) / row.numel()) + 8)
        # Not less than, so that what is no number stays.
        candidates = (~(size < sample.topk(wanted).values[-1])).nonzero().view(-1)
        if len(candidates) >= count:
            return candidates[size[candidates].topk(count, sorted=False).indices]
    return size.topk(count, sorted=False).indices


class PowerSgd(Compressor):
    """Matrices as products of two narrow ones, found by one step of a power iteration that begins with the last one's.

    With the matrices of all ranks M and the last directions Q: P = sum of M Q, made orthogonal; Q = sum of M' P; the
    sum is P Q'. A rank has sent what of its own M lies along P.
    """

    def reduce(self, bucket: Bucket) -> None:
        kept = [self.how.factored(gradient.shape) is not None for gradient in bucket.gradients]
        plain = [one for one, factored in zip(bucket.gradients, kept, strict=True) if not factored]
        chosen = [index for index, factored in enumerate(kept) if factored]
        matrices_only = Bucket(
            bucket.flat, [bucket.gradients[index] for index in chosen], [bucket.names[index] for index in chosen]
        )
        unsent = self._room(matrices_only)
        matrices = [
            (gradient + rest).flatten(1) for gradient, rest in zip(matrices_only.gradients, unsent, strict=True)
        ]
        bases = [self._basis(name, one) for name, one in zip(matrices_only.names, matrices, strict=True)]
        left = self._summed([one @ basis for one, basis in zip(matrices, bases, strict=True)] + plain)
        products, rest = left[: len(matrices)], left[len(matrices) :]
        fine = torch.stack([one.isfinite().all() for one in products]) if products else torch.ones(0, dtype=torch.bool)
        # Of what is no number nothing is made, here or on other ranks: all see the same sums.
        across = [
            torch.linalg.qr(torch.where(one, product, torch.ones_like(product))).Q
            for one, product in zip(fine, products, strict=True)
        ]
        own = [matrix.T @ side for matrix, side in zip(matrices, across, strict=True)]
        along = self._summed(own)
        for index, side in enumerate(across):
            gradient, one = matrices_only.gradients[index], fine[index]
            gradient.copy_(torch.where(one, side @ along[index].T, torch.nan).view_as(gradient))
            remaining = matrices[index].sub_(side @ own[index].T).view_as(gradient)
            torch.where(one, remaining, unsent[index], out=unsent[index])
            basis = bases[index]
            torch.where(one, along[index], basis, out=basis)
        for place, total in zip(plain, rest, strict=True):
            place.copy_(total)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their sums over ranks, in one message."""
        if not tensors:
            return []
        row = torch.cat([one.reshape(-1) for one in tensors])
        self.sum(row)
        return [
            part.view_as(one) for part, one in zip(row.split([one.numel() for one in tensors]), tensors, strict=True)
        ]

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self.bases:
            columns = self.how.columns
            index = torch.arange(matrix.shape[1] * columns, device=matrix.device).view(-1, columns)
            found = torch.linalg.qr(normal(key_of("basis", name), index)).Q.to(matrix.dtype)
            # As a checkpoint gives it back: products of another layout are rounded otherwise.
            self.bases[name] = found.contiguous()
        return self.bases[name]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which what was not sent is kept: small numbers are added up there."""
    return dtype if dtype == torch.float64 else torch.float32


KINDS: Mapping[str, type[Compressor]] = {
    "fp16": Narrow, "bf16": Narrow, "int8": Eight, "powersgd": PowerSgd, "topk": TopK,
}  # fmt: skip


def compressor(
    how: Compression, group: dist.ProcessGroup, total: Sum, dtype: torch.dtype = torch.float32
) -> Compressor:
    """The compressor of a kind, for the ranks of a group, which sums tensors with `total`; in `dtype` as long as it
    waits."""
    return KINDS[how.kind](how, group, total, dtype)
