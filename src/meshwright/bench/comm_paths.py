"""Bandwidths between every two machines of a job, measured one pair after the other; written as a cluster file."""

from __future__ import annotations

import socket
import statistics
import time
from itertools import combinations
from pathlib import Path

import tomli_w
import torch
import torch.distributed as dist

from meshwright.cluster.cluster import chip_named
from meshwright.errors import UserError
from meshwright.parallel.world import World

SIZE = 4 << 20
"""Bytes of a message, long enough that its latency is next to nothing."""
CALLS = 3


def measure_paths(file: Path, world: World) -> None:
    """Measure between the first ranks of all machines, and write the file on the first rank."""
    hosts: list[str] = world.exchange(socket.gethostname())
    names = list(dict.fromkeys(hosts))
    counts = {hosts.count(name) for name in names}
    if len(names) < 2 or len(counts) > 1:
        raise UserError("--paths goes between machines with as many ranks each; start it on two or more")
    pairs = list(combinations(names, 2))
    found = torch.zeros(len(pairs), dtype=torch.float64)
    for number, (one, other) in enumerate(pairs):
        ends = hosts.index(one), hosts.index(other)
        dist.barrier()
        if world.rank in ends:
            first = world.rank == ends[0]
            seconds = _seconds(world, ends[first], first)
            found[number] = SIZE / seconds / 1e9 if first else 0.0
    found = world.sum(found)
    if not world.is_first:
        return
    bandwidths = dict(zip(pairs, found.tolist(), strict=True))
    for (one, other), bandwidth in bandwidths.items():
        print(f"{one:>16} {other:>16} {bandwidth:10.3f} GB/s", flush=True)
    each = counts.pop()
    table = {
        "chip": _chip(world.device),
        "nodes": len(names),
        "gpus_per_node": each,
        "domain": each,
        "names": names,
        "path": [{"between": list(pair), "gb_s": float(f"{one:.4g}")} for pair, one in bandwidths.items()],
    }
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    print(f"written to {file}, for --cluster and parallel.cluster")


def _seconds(world: World, peer: int, first: bool) -> float:
    """Of a message one way: half of the time to a rank and back, who is `first` beginning."""
    message = torch.zeros(SIZE // 4, device=world.device)
    spent = []
    for _ in range(CALLS + 1):
        started = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        spent.append((time.perf_counter() - started) / 2)
    # The first one opens the connection.
    return statistics.median(spent[1:])


def _chip(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    chip = chip_named(name, memory / 2**20)
    return name if chip is None else chip.key
