"""Where a GPU's time goes in one step: its kernels by name, and how long it had nothing to do.

    python benchmarks/gpu_kernels.py --model llama3.2-1b --sequence 8192 --micro-batch 2 train.precision=fp8

Takes settings as `meshwright train` does. Prints the median of a few steps, the peak of memory, and the kernels of one
step under torch's profiler, the dearest first. `idle` is the step less its kernels: the host could not keep up, or a
step began late, since each is waited for here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.config import RunConfig
from meshwright.config_load import load_config
from meshwright.parallel.world import join_world
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec
from meshwright.training.step import TrainingStep

WARM, TIMED = 2, 6


def batches_of(config: RunConfig, strategy: Strategy, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random tokens as a rank gets them."""
    size, length = config.train.global_batch, config.data.sequence_length
    micro_steps = strategy.micro_steps(size, config.train.micro_batch)
    tokens = torch.randint(vocabulary, (micro_steps, size // micro_steps, length + 1))
    samples = torch.arange(size).view(micro_steps, -1)
    found = {"tokens": tokens, "samples": samples}
    return {name: one.pin_memory() for name, one in found.items()} | {"valid": torch.tensor(size * length)}


def main() -> None:
    """Train a few steps and look at one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--rows", type=int, default=40, help="kernels to print (default 40)")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    given = [f"model.preset={args.model}", "train.precision=bf16", "parallel.strategy=dp=1", "run.device=cuda"]
    given += [f"data.sequence_length={args.sequence}", f"train.global_batch={args.micro_batch}", *args.settings]
    config = load_config(None, given)
    spec, strategy = model_spec(config), Strategy.parse(config.parallel.strategy, 1)
    with join_world("cuda", 120.0) as world:
        step = TrainingStep(config, spec, strategy, world)

        def once(number: int) -> float:
            batch = batches_of(config, strategy, spec.vocab_size)
            torch.cuda.synchronize()
            started = time.perf_counter()
            step(number, batch)
            torch.cuda.synchronize()
            return time.perf_counter() - started

        first = once(0)
        times = [once(number) for number in range(1, 1 + WARM + TIMED)][WARM:]
        peak = torch.cuda.max_memory_allocated() / 2**30
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            once(1 + WARM + TIMED)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_time_total > 0:
            kernels[event.name].append(event.device_time_total / 1e3)
    median, busy = 1e3 * statistics.median(times), sum(map(sum, kernels.values()))
    print(f"{' '.join(args.settings) or 'bf16'}: {median:.1f} ms a step, peak {peak:.2f} GiB, first step {first:.1f} s")
    print(f"kernels {busy:.1f} ms, idle {median - busy:.1f} ms")
    for name, spent in sorted(kernels.items(), key=lambda item: -sum(item[1]))[: args.rows]:
        print(f"{sum(spent):8.2f} ms {len(spent):5} x, at most {max(spent):6.2f}  {name[:100]}")


if __name__ == "__main__":
    main()
