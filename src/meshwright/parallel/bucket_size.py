"""Measures sums over data-parallel ranks, to choose how many gradients travel together."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from meshwright.comm.bandwidth import Line
from meshwright.comm.bucket_size import best_bucket
from meshwright.comm.fitted_line import fit

SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes that are summed."""
CALLS = 4
LONG_S = 0.3
"""A sum that takes longer than this is the last one."""


def measured_bucket_mb(group: dist.ProcessGroup, gradient_bytes: int, device: torch.device) -> float:
    """MiB that gradients of so many bytes should travel in; the same on all ranks, who must all ask."""
    line = sums(group, device)
    return best_bucket(gradient_bytes, line) / 2**20


def sums(group: dist.ProcessGroup, device: torch.device) -> Line:
    """Latency and bandwidth of sums over a group; the same on all its ranks."""
    points: list[tuple[float, float]] = []
    for size in SIZES:
        data = torch.zeros(size // 4, device=device)
        seconds = torch.tensor([median(_timed(data, group) for _ in range(CALLS))], dtype=torch.float64, device=device)
        # All go by the slowest, and so choose the same.
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        points.append((float(size), float(seconds)))
        if float(seconds) > LONG_S:
            break
    return fit(points) or Line(points[0][1], float("inf"))


def _timed(data: torch.Tensor, group: dist.ProcessGroup) -> float:
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    started = time.perf_counter()
    dist.all_reduce(data, group=group)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - started
