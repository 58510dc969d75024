"""Sums of a tensor over ranks, by the backend or by an algorithm over messages, and what a rank sends for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.all_reduce import all_reduce, machines_of
from meshwright.comm.compression import ring
from meshwright.comm.travel import BACKEND


class Sum(Protocol):
    """A way to sum."""

    def __call__(self, tensor: Tensor) -> int:
        """Put the sum over ranks in the place of a tensor; gives the bytes that this rank has sent."""

    def sent(self, numbers: int, element: int) -> int:
        """Bytes that this rank would send for so many numbers of so many bytes."""


def sum_over(group: dist.ProcessGroup, algorithm: str = BACKEND) -> Sum:
    """Sums over the ranks of a group, all of which ask together."""
    return BackendSum(group) if algorithm == BACKEND else MessageSum(group, algorithm, machines_of(group))


@dataclass(frozen=True)
class BackendSum:
    """By the backend, which does not tell what it sends: counted as a ring, the least that there is."""

    group: dist.ProcessGroup

    def __call__(self, tensor: Tensor) -> int:
        dist.all_reduce(tensor, group=self.group)
        return self.sent(tensor.numel(), tensor.element_size())

    def sent(self, numbers: int, element: int) -> int:
        return ring(numbers, self.group.size(), element)


@dataclass(frozen=True)
class MessageSum:
    """By an algorithm over messages from rank to rank, counted as they are sent."""

    group: dist.ProcessGroup
    algorithm: str
    nodes: Nodes

    def __call__(self, tensor: Tensor) -> int:
        return sum(all_reduce(tensor, self.algorithm, self.group, self.nodes).values())

    def sent(self, numbers: int, element: int) -> int:
        rounds = ALGORITHMS[self.algorithm](self.group.rank(), self.group.size(), numbers, self.nodes)
        return element * sum(given.span.length for one in rounds for given in one.sends)
