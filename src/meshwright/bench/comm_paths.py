"""Bandwidths between every two machines of a job, measured one pair after the other; written as a cluster file.

All ranks of two machines send at once, each to the one in its place on the other: what they carry together is the
path's, whether it is one link that they share or a card for each.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from meshwright.cluster.cluster import chip_named
from meshwright.errors import UserError
from meshwright.parallel.world import World

SIZE = 4 << 20
"""Bytes of a message, long enough that its latency is next to nothing."""
CALLS = 3
_LONG_S, _MOST = 0.05, 64
"""On fast paths messages follow each other for so long, up to so many of them: ranks do not begin at the same time to
the microsecond."""


def measure_paths(file: Path, world: World) -> list[dict[str, Any]] | None:
    """Measure between all machines; the first rank writes the file and gets what was found, each path as a table."""
    hosts: list[str] = world.exchange(socket.gethostname())
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)}
    names, counts = list(ranks), {len(those) for those in ranks.values()}
    if len(names) < 2 or len(counts) > 1:
        raise UserError("--paths goes between machines with as many ranks each; start it on two or more")
    each, paths = counts.pop(), []
    for one, other in combinations(names, 2):
        bandwidth = each * SIZE / _seconds(world, ranks[one], ranks[other]) / 1e9
        paths.append({"between": [one, other], "gb_s": float(f"{bandwidth:.4g}")})
        if world.is_first:
            print(f"{one:>16} {other:>16} {bandwidth:10.3f} GB/s", flush=True)
    if not world.is_first:
        return None
    table = {
        "chip": _chip(world.device),
        "nodes": len(names),
        "gpus_per_node": each,
        "domain": each,
        "names": names,
        "path": paths,
    }
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    print(f"written to {file}, for --cluster and parallel.cluster")
    return paths


def _seconds(world: World, near: Sequence[int], far: Sequence[int]) -> float:
    """In which a message of each rank of a machine has come to the other one, on average of both directions."""
    message = torch.zeros(SIZE // 4, device=world.device)
    # The first ones open connections, the second ones tell how many fit in a while.
    for _ in range(2):
        alone = max(_one_way(world, message, *ends, 1) for ends in ((near, far), (far, near)))
    calls = max(1, min(_MOST, int(_LONG_S / alone)))
    spent = [
        sum(_one_way(world, message, *ends, calls) for ends in ((near, far), (far, near))) / 2 / calls
        for _ in range(CALLS)
    ]
    return statistics.median(spent)


def _one_way(
    world: World, message: torch.Tensor, senders: Sequence[int], receivers: Sequence[int], calls: int
) -> float:
    """Seconds until the last of all messages has arrived, on all ranks the same. One direction at a time: pairs that
    went there and back by themselves would use both at once, and seem to carry twice as much."""
    dist.barrier()
    started, spent = time.perf_counter(), 0.0
    for sender, receiver in zip(senders, receivers, strict=True):
        for _ in range(calls if world.rank in (sender, receiver) else 0):
            if world.rank == sender:
                dist.send(message, receiver)
            else:
                dist.recv(message, sender)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.rank in receivers:
        spent = time.perf_counter() - started
    return float(world.gather(torch.tensor([spent], dtype=torch.float64)).max())


def _chip(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    chip = chip_named(name, memory / 2**20)
    return name if chip is None else chip.key
