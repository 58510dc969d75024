"""All-reduce over messages from rank to rank, by one of the algorithms: for study, and where a backend has no good one.

Sums are made in the tensor's own dtype, in the order of the algorithm: like a backend's, they differ from those of
another order in their last bits. All ranks get the same bits, since each sum is made once and then copied.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.rounds import Round
from meshwright.comm.transfers import together
from meshwright.errors import ConfigError


def all_reduce(
    tensor: Tensor, algorithm: str = "ring", group: dist.ProcessGroup | None = None, nodes: Nodes = ()
) -> dict[int, int]:
    """Put the sum over the ranks of a group in the place of each one's tensor; gives the bytes sent, by receiver."""
    group = group or dist.group.WORLD
    assert group is not None
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"there is no all-reduce called '{algorithm}'; there are {', '.join(ALGORITHMS)}")
    flat = tensor.contiguous().view(-1)
    rounds = ALGORITHMS[algorithm](group.rank(), group.size(), flat.numel(), nodes)
    sent = run_rounds(flat, rounds, group)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    return sent


def machines_of(group: dist.ProcessGroup) -> Nodes:
    """The ranks of a group by the machine that they run on, in its numbering; all ranks of it ask together."""
    # In numbers, since a group may carry nothing but tensors: a hash tells names apart.
    name = xxhash.xxh3_64_intdigest(socket.gethostname().encode()) >> 1
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(everyone, torch.tensor([name]), group=group)
    names = [int(one) for one in everyone]
    return [[rank for rank, one in enumerate(names) if one == name] for name in dict.fromkeys(names)]


def run_rounds(flat: Tensor, rounds: Sequence[Round], group: dist.ProcessGroup) -> dict[int, int]:
    """Do what a rank has to do, on its numbers in one row; gives the bytes that it has sent, by receiver."""
    sent: dict[int, int] = defaultdict(int)
    room: dict[int, Tensor] = {}
    for one in rounds:
        arrivals = []
        for place, taken in enumerate(one.receives):
            target = flat[taken.span.start : taken.span.stop]
            arrivals.append(_room(room, place, target) if taken.adds else target)
        together(
            [(flat[given.span.start : given.span.stop], given.to) for given in one.sends],
            [(arrival, taken.origin) for arrival, taken in zip(arrivals, one.receives, strict=True)],
            group,
        ).wait()
        for arrival, taken in zip(arrivals, one.receives, strict=True):
            if taken.adds:
                flat[taken.span.start : taken.span.stop].add_(arrival)
        for given in one.sends:
            sent[given.to] += given.span.length * flat.element_size()
    return sent


def _room(room: dict[int, Tensor], place: int, target: Tensor) -> Tensor:
    """Memory for what arrives to be added, used again from round to round."""
    if place not in room or room[place].numel() < target.numel():
        room[place] = torch.empty_like(target)
    return room[place][: target.numel()]
