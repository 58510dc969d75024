"""What one rank sends another: begun now, waited for later, through host memory where the backend cannot read a GPU's.

gloo's collectives take tensors of a GPU and stage them by themselves. Its messages from rank to rank do not: they hand
the address to the kernel's sockets, which ends the process. So where ranks share a GPU over gloo, a message is copied
to host memory, sent from there, and copied to the GPU where it arrives. NCCL and CPU tensors go as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Message:
    """Something on its way, in one direction or in both."""

    works: Sequence[dist.Work]
    held: tuple[Tensor, ...]
    """The memory that is read or written meanwhile."""
    arrivals: Sequence[tuple[Tensor, Tensor]] = ()
    """Where it arrives in host memory, and where that goes then."""

    def wait(self) -> None:
        """Return when it has left or is here, as far as later work on this device can tell; once is enough."""
        for work in self.works:
            work.wait()
        # gloo would wait for another message.
        self.works = ()
        for host, target in self.arrivals:
            # gloo has written all of it by now. The allocator of pinned memory keeps it until the copy is done.
            target.copy_(host, non_blocking=True)
        self.arrivals = ()

    def is_completed(self) -> bool:
        """Whether the backend says that it is through; gloo does not before somebody waits."""
        return not self.arrivals and all(work.is_completed() for work in self.works)


def send(tensor: Tensor, group: dist.ProcessGroup, to: int) -> Message:
    """Begin to send to a rank of the group."""
    held = _outgoing(tensor, group)
    work = dist.isend(held, group=group, group_dst=to)
    assert work is not None
    return Message([work], (held,))


def receive(tensor: Tensor, group: dist.ProcessGroup, origin: int) -> Message:
    """Begin to receive from a rank of the group; after `wait` it is in the tensor."""
    held, arrivals = _incoming(tensor, group)
    work = dist.irecv(held, group=group, group_src=origin)
    assert work is not None
    return Message([work], (held,), arrivals)


def exchange(outgoing: Tensor, to: int, incoming: Tensor, origin: int, group: dist.ProcessGroup) -> Message:
    """Begin to send to one rank of the group and to receive from another; all ranks of the group do so."""
    return together([(outgoing, to)], [(incoming, origin)], group)


def together(
    outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup
) -> Message:
    """Begin to send to some ranks of the group and to receive from others, all at once."""
    operations, held, arrivals = [], [], []
    # gloo sends nothing before it is told that somebody waits for it, and tells that behind what it is already sending:
    # of two ranks that send first, the later one's word comes after all of its message, and they take turns.
    for tensor, origin in incoming:
        where, later = _incoming(tensor, group)
        held.append(where)
        arrivals += later
        operations.append(dist.P2POp(dist.irecv, where, group=group, group_peer=origin))
    for tensor, to in outgoing:
        held.append(_outgoing(tensor, group))
        operations.append(dist.P2POp(dist.isend, held[-1], group=group, group_peer=to))
    return Message(dist.batch_isend_irecv(operations) if operations else [], tuple(held), arrivals)


def must_stage(backends: str, device_type: str) -> bool:
    """Whether messages go through host memory in a group of such backends ("cpu:gloo,cuda:nccl")."""
    found = dict(pair.split(":") for pair in backends.split(","))
    return device_type != "cpu" and found.get(device_type) == "gloo"


def is_staged(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a message goes through host memory."""
    return tensor.device.type != "cpu" and must_stage(dist.get_backend_config(group), tensor.device.type)


def _outgoing(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the backend reads."""
    if not is_staged(tensor, group):
        return tensor
    # The host waits for this copy: gloo reads it at once, from a thread that knows nothing of streams.
    return _host_memory(tensor).copy_(tensor)


def _incoming(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What the backend writes, and from where to where it is copied then."""
    if not is_staged(tensor, group):
        return tensor, []
    host = _host_memory(tensor)
    return host, [(host, tensor)]


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
