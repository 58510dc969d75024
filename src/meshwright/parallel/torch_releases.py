"""What differs between the supported PyTorch releases, and public names that its type information leaves out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    FileStore,
    GradBucket,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    get_debug_level,
    new_group,
    set_debug_level,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "BUFFERS_STAY_LOCAL",
    "RELEASE",
    "FileStore",
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_into",
    "check_collectives",
    "group_for_ddp",
    "group_of",
    "reduce_scatter_into",
    "unchecked",
]

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters

# 2.13 renamed it and warns of the old name.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers the ranks' tensors into one."""
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Adds the ranks' tensors up and gives each its part."""

# 2.13 renamed the argument and warns of the old name.
BUFFERS_STAY_LOCAL: dict[str, Any] = (
    {"forward_sync_buffers": False} if "forward_sync_buffers" in _DDP_ARGUMENTS else {"broadcast_buffers": False}
)
"""Arguments with which DistributedDataParallel leaves buffers alone in forward passes."""


def check_collectives() -> None:
    """From now on, process groups of this process check that ranks agree on what they do.

    Before 2.13 such groups lack the collectives that DTensors use over gloo, and nothing is checked.
    """
    if RELEASE >= (2, 13):
        set_debug_level(DebugLevel.DETAIL)


def group_of(ranks: list[int]) -> ProcessGroup:
    """A process group of these ranks, who must all ask for it, in their order, and nobody else."""
    return new_group(ranks, use_local_synchronization=True)


def group_for_ddp(group: ProcessGroup) -> ProcessGroup:
    """The group of all ranks as DistributedDataParallel can take it.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL groups check what passes through them, and DDP's logger dies of such a group
    over gloo (2.13); it gets one that does not check.
    """
    if get_debug_level() != DebugLevel.DETAIL:
        return group
    with unchecked():
        return new_group()


@contextmanager
def unchecked() -> Iterator[None]:
    """The context in which groups are made that do not check what passes through them."""
    before = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(before)
