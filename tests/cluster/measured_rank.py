"""One rank of a launcher's job on a host of its own that measures how gradients travel, and prints it as JSON.

python -m tests.cluster.measured_rank bytes KIND...        what leaves the host for a sum with each kind of compression
python -m tests.cluster.measured_rank steps KIND...        seconds of a training step with each, in turn
python -m tests.cluster.measured_rank overlap BUCKET_MB    seconds of backward passes, of sums, of both together
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from meshwright.comm.compression import Compression
from meshwright.comm.compressors import Bucket, compressor
from meshwright.comm.sums import sum_over
from meshwright.config import load_config
from meshwright.models.presets import preset
from meshwright.parallel.world import World, join_world, launched_ranks
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep

SHAPES = ((1000, 700), (333, 900), (5000,))
SPEC = preset("demo").model_copy(update={"num_hidden_layers": 4})
TOKENS, SAMPLES = 64, 2
TURNS = 3


def bytes_on_the_wire(world: World, kinds: list[str]) -> dict[str, dict[str, float]]:
    """Bytes that this host sent for a sum, and those that were counted."""
    group = dist.group.WORLD
    assert group is not None
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    found = {}
    for kind in kinds:
        flat = torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES))
        parts = flat.split([torch.Size(shape).numel() for shape in SHAPES])
        bucket = Bucket(flat, [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)], list("abc"))
        one = compressor(Compression.parse("bf16" if kind == "none" else kind), group, sum_over(group))
        one.whole_steps = 1 if kind == "none" else 0
        one(bucket)
        dist.barrier()
        before, counted = int(counter.read_text()), one.sent
        for _ in range(TURNS):
            one(bucket)
        dist.barrier()
        sent = int(counter.read_text()) - before
        found[kind] = {"sent": sent / TURNS, "counted": (one.sent - counted) / TURNS}
    return found


def step_with(world: World, kind: str, bucket_mb: float | None = None) -> Callable[[], float]:
    """Does a training step, and gives its seconds."""
    settings = [f"train.global_batch={SAMPLES * world.size}", f"data.sequence_length={TOKENS}"]
    settings += [f"comm.bucket_mb={bucket_mb}"] if bucket_mb else []
    settings.append("comm.compress_after=0")
    strategy = Strategy.parse(f"dp={world.size} compress={kind}", world.size)
    step = TrainingStep(load_config(None, settings), SPEC, strategy, world)
    tokens = torch.randint(SPEC.vocab_size, (1, SAMPLES, TOKENS + 1))
    batch = {"tokens": tokens, "samples": torch.arange(SAMPLES)[None]}
    numbers = iter(range(1000))

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        step(next(numbers), batch)
        return time.perf_counter() - started

    return run


def step_times(world: World, kinds: list[str]) -> dict[str, float]:
    """The median step of each kind; they take turns."""
    steps = {kind: step_with(world, kind) for kind in kinds}
    for one in steps.values():
        one()
        one()
    times = [{kind: one() for kind, one in steps.items()} for _ in range(5)]
    return {kind: median(row[kind] for row in times) for kind in kinds}


def overlap(world: World, bucket_mb: float) -> dict[str, float]:
    """Seconds of the passes alone, of the sums alone, and of a step with both."""
    config = load_config(None, [f"comm.bucket_mb={bucket_mb}", f"data.sequence_length={TOKENS}"])
    step = TrainingStep(config, SPEC, Strategy.parse(f"dp={world.size}", world.size), world)
    # So many that a backward pass takes about as long as the sums.
    parallel, tokens = step.parallel, torch.randint(SPEC.vocab_size, (8 * SAMPLES, TOKENS))
    sizes = [part.numel() for part in parallel.parameters()]
    buckets = [torch.zeros(int(bucket_mb * 2**18)) for _ in range(round(sum(sizes) / (bucket_mb * 2**18)))]

    def backward(last: bool) -> float:
        dist.barrier()
        with parallel.micro_step(last=last):
            loss = parallel(tokens).float().logsumexp(-1).mean()
            started = time.perf_counter()
            loss.backward()
        return time.perf_counter() - started

    def sums() -> float:
        dist.barrier()
        started = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()
        return time.perf_counter() - started

    for _ in range(2):
        backward(last=True)
    rows = [(backward(last=False), sums(), backward(last=True)) for _ in range(11)]
    passes, alone, both = (median(column) for column in zip(*rows, strict=True))
    return {"backward": passes, "sums": alone, "both": both, "buckets": len(buckets)}


def main(what: str, *words: str) -> None:
    """Measure and print."""
    launched = launched_ranks()
    assert launched is not None
    with join_world("cpu", 120.0, launched) as world:
        if what == "overlap":
            found: object = overlap(world, float(words[0]))
        else:
            found = {"bytes": bytes_on_the_wire, "steps": step_times}[what](world, list(words))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # What threads of torch do while an interpreter ends, which now and then ends it by a signal, is not measured.
    os._exit(0)
