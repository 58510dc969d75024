"""World: which rank this process is, of how many, on which device. Passed around, never global.

A single process is a world of one without a process group. Ranks of a launcher (torchrun, Slurm's wrapper, ...) are
found from its environment variables; local ranks are started by `elastic.ranks`, which gives the store.

Ranks with a GPU each talk over NCCL, which refuses two ranks on one GPU. Asked to share GPUs (run.device=cuda-shared)
they talk over gloo, through host memory: for proofs and trials of several ranks where there is one card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from meshwright.errors import ConfigError
from meshwright.lock import Fence
from meshwright.parallel.exchange import Exchange
from meshwright.parallel.torch_releases import Store, all_gather_into
from meshwright.pulse import Pulse
from meshwright.torch_private import forget_meshes

SHARED = "cuda-shared"
"""The setting of run.device with which ranks share GPUs."""


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    pulse: Pulse = field(default_factory=Pulse)
    """Where this rank says what it is doing."""
    local: int = 1
    """Ranks of this machine."""
    fence: Fence | None = None
    """The launcher's hold on the run folder, while it lasts for this rank; None when no launcher holds it."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: console, metrics, checkpoints."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None in a world of one."""
        return dist.group.WORLD if self.size > 1 else None

    @property
    def sharing(self) -> str | None:
        """That ranks share GPUs, in words; None where they do not."""
        if self.device.type != "cuda" or self.backend != "gloo":
            return None
        gpus = visible_gpus()
        return f"{self.local} ranks share {gpus} GPU{'s' * (gpus > 1)} over gloo: right results, not speed"

    def side_channel(self) -> Exchange:
        """A way for the ranks to tell each other things, on a group of its own; all ranks ask for one together.

        Whoever writes to slow storage may take long, and one that is gone is noticed by its connection: a day is the
        limit, not that of collectives.
        """
        return Exchange(dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self.size > 1 else None)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's values, (ranks, ...); they have one shape on all ranks."""
        if self.size == 1:
            return values[None]
        everyone = values.new_empty(self.size, *values.shape)
        all_gather_into(everyone.view(-1), values.contiguous().view(-1), group=dist.group.WORLD)
        return everyone

    def exchange(self, facts: Any) -> list[Any]:
        """What every rank has to say, as far as JSON can say it; for rare occasions."""
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(text)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        rows = zip(self.gather(padded), lengths, strict=True)
        return [json.loads(bytes(row[:length].tolist())) for row, length in rows]


def sum_in_one_order() -> None:
    """Let sums over ranks take the same order in every run; read when NCCL starts. gloo's always do."""
    os.environ.setdefault("NCCL_ALGO", "Ring")


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> int:
    """GPUs that PyTorch can use here; counted without starting CUDA."""
    return torch.cuda.device_count()


def launched_ranks() -> tuple[int, int, int] | None:
    """(rank, size, local rank) that a launcher's environment names, if one started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank = int(os.environ["RANK"])
        ranks = rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank))
    except ValueError:
        raise ConfigError("RANK, WORLD_SIZE and LOCAL_RANK are set, but not to whole numbers; unset them") from None
    if not 0 <= ranks[0] < ranks[1] or ranks[2] < 0:
        raise ConfigError(
            f"RANK={ranks[0]}, WORLD_SIZE={ranks[1]} and LOCAL_RANK={ranks[2]} name no rank; ranks are 0 to "
            "WORLD_SIZE - 1: unset them, or start with torchrun"
        )
    port = os.environ.get("MASTER_PORT", "1")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port} is no port; unset it, or start with torchrun")
    if ranks[1] > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "RANK and WORLD_SIZE are set without MASTER_ADDR and MASTER_PORT; unset them, or start with torchrun"
        )
    return ranks


def launcher_store(timeout_s: float) -> Store:
    """The store that a launcher's variables name; for ranks that talk before they have their numbers."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store


def local_ranks(size: int) -> int:
    """Ranks of this machine, as launchers tell it; all of them where nobody does."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) > 0 else size


def pick_device(setting: str, local_rank: int) -> torch.device:
    """The device of a local rank for run.device=auto|cpu|cuda|cuda-shared."""
    available = torch.cuda.is_available()
    if setting in ("cuda", SHARED) and not available:
        raise ConfigError(
            f"run.device='{setting}' and PyTorch sees no GPU; set run.device=cpu, or install a CUDA build of PyTorch"
        )
    if setting == "cpu" or not available:
        return torch.device("cpu")
    gpus = visible_gpus()
    if setting == SHARED:
        return torch.device("cuda", local_rank % gpus)
    if local_rank >= gpus:
        raise ConfigError(
            f"process {local_rank + 1} on this machine has no GPU of its own ({gpus} found); start with --nproc {gpus} "
            f"or set run.device=cpu. run.device={SHARED} lets processes share a GPU: right results, not speed"
        )
    return torch.device("cuda", local_rank)


def backend_for(setting: str, device: torch.device) -> str:
    """What ranks on such devices talk over; one word of the setting decides for all of them, on all machines."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and setting != SHARED else "gloo"


@contextmanager
def join_world(
    device_setting: str,
    timeout_s: float,
    ranks: tuple[int, int, int] = (0, 1, 0),
    store: Store | None = None,
    pulse: Pulse | None = None,
    fence: Fence | None = None,
) -> Iterator[World]:
    """The world of (rank, size, local rank); its process group lives as long as the context."""
    rank, size, local_rank = ranks
    pulse = pulse or Pulse(rank)
    device = pick_device(device_setting, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device, pulse=pulse, fence=fence)
        return
    backend = backend_for(device_setting, device)
    timeout = timedelta(seconds=timeout_s)
    # Without a store, torch finds the one that the launcher's variables name.
    where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **where)
    try:
        yield World(rank, size, device, "nccl" if "nccl" in backend else "gloo", pulse, local_ranks(size), fence)
    finally:
        dist.destroy_process_group()
        forget_meshes()
