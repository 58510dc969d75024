"""Host memory that is written and read by a device: pinned on GPUs, kept for the next step, never more than was needed.

Pinning takes far longer than a copy, so buffers are used again. Sizes come in classes, eight for each doubling, since
what a mixture of experts keeps is of another size in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CLASSES = 8
"""Sizes of buffers between one power of two and the next."""


class Buffer:
    """A run of bytes in host memory."""

    def __init__(self, memory: Tensor, pinned: bool) -> None:
        self.memory, self.pinned = memory, pinned
        self.free_after: Any = None
        """The event after which a device has done with it; None where nothing runs beside the host."""

    def elements(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first of its bytes, as so many elements."""
        return self.memory[: count * dtype.itemsize].view(dtype)


class HostMemory:
    """Buffers, in use and free."""

    def __init__(self, place: str = "cpu") -> None:
        self.place = place
        """On which device they are made; rehearsals, which count a device's memory, have them elsewhere."""
        self.in_use = self.most = 0
        """Bytes now, and at most so far."""
        self._free: dict[tuple[int, bool], list[Buffer]] = {}
        self.idle = 0
        """Bytes of free buffers."""

    def take(self, size: int, pinned: bool) -> Buffer:
        """A buffer of at least so many bytes."""
        size = size_class(size)
        self.in_use += size
        self.most = max(self.most, self.in_use)
        free = self._free.get((size, pinned))
        if free:
            self.idle -= size
            return free.pop()
        self._shrink(self.most - self.in_use)
        return Buffer(torch.empty(size, dtype=torch.uint8, device=self.place, pin_memory=pinned), pinned)

    def give(self, buffer: Buffer) -> None:
        """Take it back."""
        size = buffer.memory.numel()
        self.in_use -= size
        self.idle += size
        self._free.setdefault((size, buffer.pinned), []).append(buffer)

    def _shrink(self, idle: int) -> None:
        """Let free buffers of other sizes go until so many bytes of them are left."""
        for free in self._free.values():
            while free and self.idle > idle:
                self.idle -= free.pop().memory.numel()


def size_class(size: int) -> int:
    """The size of the smallest buffer that holds so many bytes."""
    step = max(1, (1 << max(0, (size - 1).bit_length() - 1)) // CLASSES)
    return -(-size // step) * step
