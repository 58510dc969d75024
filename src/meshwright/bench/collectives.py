"""Collectives to be measured: what each is given and gives, of a size as nccl-tests counts it, and if it is right.

Every rank puts in numbers that follow from who it is and where they are, small whole ones, so that sums are exact in
every dtype; what comes out can be computed by anyone. Numbers repeat after a few places, and so do their sums: a check
needs no memory to speak of beside what is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transfers import exchange
from meshwright.parallel.torch_releases import all_gather_into, reduce_scatter_into

PERIOD = 13
"""Numbers repeat after so many places, differently on every rank."""
_PIECE = PERIOD << 14
"""Elements that are looked at together."""


class Collective(ABC):
    """One operation in one group, of one size."""

    divides: ClassVar[bool] = False
    """Whether the size is that of all ranks' parts, so that it must be a multiple of their number."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        """`count` elements, as nccl-tests counts them."""
        self.count, self.dtype, self.device, self.group = count, dtype, device, group
        self.rank, self.ranks = group.rank(), group.size()
        self.given = repeated(self.numbers(self.rank), self.count_given())
        self.made = torch.zeros(self.count_made(), dtype=dtype, device=device)

    def count_given(self) -> int:
        """Elements that a rank puts in."""
        return self.count

    def count_made(self) -> int:
        """Elements that come out on a rank."""
        return self.count

    def numbers(self, rank: int, first: int = 0) -> Tensor:
        """What a rank puts in again and again, from a place on."""
        places = torch.arange(first, first + PERIOD, device=self.device)
        # Sums of so many are exact in eight bits of a fraction.
        most = 4 if self.ranks <= 64 else 2
        return ((places + 3 * rank) % PERIOD % most).to(self.dtype)

    @abstractmethod
    def run(self) -> None:
        """Do it once."""

    def summed(self, first: int = 0) -> Tensor:
        """The sum of what all ranks put in."""
        return torch.stack([self.numbers(rank, first) for rank in range(self.ranks)]).sum(dim=0, dtype=self.dtype)

    @abstractmethod
    def expected(self) -> list[Tensor]:
        """What must come out here when it is done once, in equal parts: the numbers that each repeats."""

    def wrong(self) -> int:
        """How many elements are wrong after one call from what was put in."""
        self.made.zero_()
        self.run()
        return self.differences()

    def differences(self) -> int:
        """How many elements are not what they must be."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        parts = self.expected()
        rows, found = self.made.view(len(parts), -1), 0
        for row, numbers in zip(rows, parts, strict=True):
            wanted = repeated(numbers, min(_PIECE, len(row)))
            found += sum(int((piece != wanted[: len(piece)]).sum()) for piece in row.split(_PIECE))
        return found


def repeated(numbers: Tensor, count: int) -> Tensor:
    """So many elements of numbers that repeat."""
    return numbers.repeat(-(-count // len(numbers)))[:count]


class AllReduce(Collective):
    def run(self) -> None:
        # In place: what is put in again and again is copied before the check only.
        dist.all_reduce(self.made, group=self.group)

    def wrong(self) -> int:
        self.made.copy_(self.given)
        self.run()
        found = self.differences()
        # Sums of sums would grow without end.
        self.made.zero_()
        return found

    def expected(self) -> list[Tensor]:
        return [self.summed()]


class ReduceScatter(Collective):
    divides = True

    def count_made(self) -> int:
        return self.count // self.ranks

    def run(self) -> None:
        reduce_scatter_into(self.made, self.given, group=self.group)

    def expected(self) -> list[Tensor]:
        return [self.summed(self.rank * self.count_made())]


class AllGather(Collective):
    divides = True

    def count_given(self) -> int:
        return self.count // self.ranks

    def run(self) -> None:
        all_gather_into(self.made, self.given, group=self.group)

    def expected(self) -> list[Tensor]:
        return [self.numbers(rank) for rank in range(self.ranks)]


class AllToAll(Collective):
    divides = True

    def run(self) -> None:
        dist.all_to_all_single(self.made, self.given, group=self.group)

    def expected(self) -> list[Tensor]:
        return [self.numbers(rank, self.rank * (self.count // self.ranks)) for rank in range(self.ranks)]


class Broadcast(Collective):
    def run(self) -> None:
        dist.broadcast(self.made, group=self.group, group_src=0)

    def wrong(self) -> int:
        self.made.copy_(self.given)
        self.run()
        return self.differences()

    def expected(self) -> list[Tensor]:
        return [self.numbers(0)]


class SendReceive(Collective):
    """To the next rank, from the one before, as nccl-tests' sendrecv."""

    def run(self) -> None:
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        exchange(self.given, after, self.made, before, self.group).wait()

    def expected(self) -> list[Tensor]:
        return [self.numbers((self.rank - 1) % self.ranks)]


OPERATIONS: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "broadcast": Broadcast,
    "send_receive": SendReceive,
}
