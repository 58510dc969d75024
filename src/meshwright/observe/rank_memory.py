"""What a rank holds in memory: of what kind, and how much in all."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from meshwright.models.parts import local_of

PERIOD_S = 0.1
"""Seconds for which a reading counts: the kernel takes as long for it as all else that is recorded of a short step."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class RankMemory:
    """Memory of this process, read now and then, from a file that stays open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The process of who opens it: one that was forked later must open it again.
        self._statm: int | None = None
        self._beside: int | None = None
        """Asked for once: the driver takes its time."""
        self._bytes: dict[str, int] = {}
        self._peak = 0
        self._until = 0.0
        """When these are too old."""
        with suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def now(self) -> dict[str, int]:
        """Bytes of this process in host memory; on a GPU also what tensors use and what torch keeps, the most that
        tensors have used so far, and the most that was held of the GPU in all. Not to be changed."""
        self._look()
        return self._bytes

    def peak(self) -> int:
        """Bytes held at most so far: on a GPU by torch and beside it, else by this process."""
        self._look()
        return self._peak

    def _look(self) -> None:
        """Read again what is too old."""
        asked = time.monotonic()
        if asked < self._until:
            return
        self._until = asked + PERIOD_S
        found = {"rss": self._resident()}
        if self._device.type == "cuda":
            # One call: each of torch's single numbers would make them all.
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            if self._beside is None:
                self._beside = beside_torch(self._device)
            found |= {
                "allocated": allocated["current"],
                "reserved": reserved["current"],
                "peak": allocated["peak"],
                "held": reserved["peak"] + self._beside,
            }
        self._bytes = found
        self._peak = found["held"] if "held" in found else _resident_peak()

    def _resident(self) -> int:
        if self._statm is not None:
            return int(os.pread(self._statm, 100, 0).split()[1]) * _PAGE
        return _resident_peak()

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


def _resident_peak() -> int:
    """The most bytes so far, which macOS counts in bytes and others in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def beside_torch(device: torch.device) -> int:
    """Bytes of a GPU that torch does not manage: the driver's share, and libraries'."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def peak_memory(device: torch.device) -> float:
    """Bytes that this process held at most: on a GPU what torch has reserved, with the driver's own share."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device) + beside_torch(device))
    return float(_resident_peak())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return _storages(model.parameters())


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that this rank holds now."""
    return _storages(one.grad for one in model.parameters() if one.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this rank."""
    states = optimizer.state.values()
    return _storages(value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    held = {}
    for tensor in tensors:
        storage = local_of(tensor).untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())
