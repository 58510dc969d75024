"""Measures this machine for the planner: matrix products, memory, a layer's overhead, a collective. Needs torch.

For ranks on CPU cores; a few seconds. What it finds is stored for `--cluster here` (cluster.calibration_file).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from math import log2
from pathlib import Path

from meshwright.cluster.cluster import CROWDS, calibration_file
from meshwright.files import write_atomically
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World

_LAYER = ModelSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)


def calibrate() -> tuple[dict[str, float], Path]:
    """Measure, store, and say where."""
    from meshwright.verify.pool import RankPool

    found: dict[str, float] = {}
    with RankPool(max(CROWDS)) as pool:
        (alone,) = pool.run(_alone, 1)
        found |= alone
        for ranks in CROWDS:
            together = pool.run(_together, ranks)
            found[f"latency_{ranks}_s"] = max(one[0] for one in together)
            if ranks == 2:
                found["link_gb_s"] = min(one[1] for one in together)
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1) + "\n")
    return found, path


def _fastest(work: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of some runs: others measure what else the machine does."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _alone(world: World) -> dict[str, float]:
    import torch

    from meshwright.models.decoder import Decoder

    size = 384
    left, right = torch.randn(size, size), torch.randn(size, size)
    gflops = 2 * size**3 / _fastest(lambda: left @ right) / 1e9
    wide = torch.randn(1 << 22)
    memory = 2 * wide.nbytes / _fastest(wide.clone) / 1e9
    model = Decoder(_LAYER)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    layer = _fastest(lambda: model(tokens), 15) / _LAYER.num_hidden_layers
    return {"gflops": gflops, "memory_gb_s": memory, "layer_s": layer}


def _together(world: World) -> tuple[float, float]:
    """Seconds of a step of a small collective, as it comes between other work, and GB/s of a large one."""
    import torch
    import torch.distributed as dist

    small, large = torch.zeros(64), torch.zeros(1 << 20)
    for tensor in (small, large):
        dist.all_reduce(tensor)
    left = torch.randn(192, 192)
    seconds = []
    for _ in range(60):
        # Ranks that share cores wait for each other's turn, which only shows between pieces of work.
        left @ left
        started = time.perf_counter()
        dist.all_reduce(small)
        seconds.append(time.perf_counter() - started)
    usual = statistics.fmean(seconds)
    whole = _fastest(lambda: dist.all_reduce(large), 7)
    steps = 2 * (1 + log2(world.size))
    return usual / steps, large.nbytes / max(whole - min(seconds), 1e-6) / 1e9
