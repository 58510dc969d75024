"""Limits of the operating system that runs over NCCL meet: locked memory, open files, shared memory. No torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.cluster.hardware import Hardware
from meshwright.comm.nccl_profile import Finding, Level
from meshwright.comm.nccl_selection import rdma_ports

_LOCK_ANYWAY = 14
"""The bit of CAP_IPC_LOCK, with which the limit on locked memory does not count."""
_FEW_FILES = 4096
_LITTLE_LOCKED = 2**30
_LITTLE_SHARED = 2**29


@dataclass(frozen=True)
class HostLimits:
    """Of a process here; None is without limit, or not known."""

    locked_bytes: int | None
    open_files: int | None
    shared_bytes: int | None
    """Size of /dev/shm."""


def read_limits() -> HostLimits:
    """Those of this process, which its ranks inherit."""
    return HostLimits(
        None if _may_lock() else _soft(resource.RLIMIT_MEMLOCK), _soft(resource.RLIMIT_NOFILE), _shared_memory()
    )


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _may_lock() -> bool:
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> _LOCK_ANYWAY & 1)


def _shared_memory() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def check_limits(limits: HostLimits, hardware: Hardware) -> Iterator[Finding]:
    """Which of them are too low for what the machine has."""
    if not hardware.gpus:
        return
    if rdma_ports(hardware, None) and limits.locked_bytes is not None:
        locked = limits.locked_bytes
        level = Level.BREAKS if locked < _LITTLE_LOCKED else Level.WARNING
        text = f"a process may lock {locked / 2**20:,.4g} MiB of memory"
        cost = "RDMA locks its buffers: connections fail with `Cannot allocate memory`"
        remedy = "ulimit -l unlimited (systemd: LimitMEMLOCK; containers: --ulimit memlock=-1)"
        yield Finding(level, "locked memory", text, cost, remedy)
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        text = f"a process may open {limits.open_files:,} files and sockets"
        cost = "every rank has sockets to many others: large runs fail with `Too many open files`"
        yield Finding(Level.WARNING, "open files", text, cost, "ulimit -n 65536 (systemd: LimitNOFILE)")
    if limits.shared_bytes is not None and limits.shared_bytes < _LITTLE_SHARED and len(hardware.gpus) > 1:
        text = f"/dev/shm has {limits.shared_bytes / 2**20:,.4g} MiB"
        cost = "ranks of this machine that NVLink does not join exchange data there, and fail when it is full"
        yield Finding(Level.WARNING, "shared memory", text, cost, "containers: --shm-size=8g, or --ipc=host")
