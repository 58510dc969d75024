"""What shares and uneven stages gain where one rank is slower than the other: two ranks on two cores, one core shared.

    python benchmarks/unequal_ranks.py [--steps 8] [--sleep 5]

Each rank is bound to a core of its own; beside the second one an endless loop runs on the same core, so that it gets
half of it. The trainer's own step trains a small decoder under each strategy; the median step counts. The last line is
what the planner makes of two chips of which one is half as fast.

On a machine that others use too, `--sleep 5` shows the same without much computing: a layer of a tiny decoder sleeps
5 ms for each sample on the first rank and 10 ms on the second one ("one slow"), or 5 ms on both ("alike").
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.cluster.cluster import cpu_ranks
from meshwright.cluster.groups import together
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.planning.question import Question, estimate
from meshwright.planning.search import search
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool

SPEC = ModelSpec(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=256,
)
BATCH, TOKENS = 12, 64
STRATEGIES = (
    ("dp=2", 6),
    ("dp=2 shares=2+1", 4),
    ("dp=2 shares=3+1", 3),
    ("dp=2 zero=3", 6),
    ("dp=2 zero=3 shares=2+1", 4),
    ("dp=1 pp=2", 3),
    ("dp=1 pp=2 layers=5+3", 3),
    ("dp=1 pp=2 layers=6+2", 3),
)
"""Short form, samples of a share's forward pass."""


def timed(world: World, case: Case, seconds: float = 0.0) -> float:
    """Seconds of the median step on this rank, which has the core of its number to itself, but for an endless loop.

    Its layers sleep so long for each sample.
    """
    cores = sorted(os.sched_getaffinity(0))
    # All threads of a process: those of collectives too.
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[world.rank]})
    try:
        step = step_of(world, case)
        for block in step.model.model.layers.values():
            block.register_forward_pre_hook(lambda _, inputs: time.sleep(len(inputs[0]) * seconds))
        found = []
        for number in range(case.steps):
            batch = batch_of(case, number, step.data_rank, step.strategy)
            started = time.perf_counter()
            step(number, batch)
            found.append(time.perf_counter() - started)
        return statistics.median(found[2:])
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def slept(world: World, case: Case, seconds: float, one_slow: bool) -> float:
    """The same with sleep on this rank, twice as much on the second one."""
    return timed(world, case, seconds * (2 if one_slow and world.rank == 1 else 1))


def asleep(seconds: float, steps: int) -> None:
    """Measure with layers that sleep."""
    tiny = SPEC.model_copy(
        update={"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 4, "num_key_value_heads": 8}
    )
    with RankPool(2) as pool:
        print(f"{'strategy':26} {'alike':>8} {'one slow':>9}")
        for text, micro_batch in STRATEGIES:
            micro_steps = Strategy.parse(text, 2).micro_steps(BATCH, micro_batch)
            case = Case(tiny, text, 2, "float32", micro_steps, steps, BATCH, 8)
            alike, uneven = (max(pool.run(slept, 2, case, seconds, one_slow)) for one_slow in (False, True))
            print(f"{text:26} {alike:8.3f} {uneven:9.3f}", flush=True)


def main() -> None:
    """Measure with and without the endless loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sleep", type=float, metavar="MS", help="milliseconds that a layer sleeps for each sample")
    args = parser.parse_args()
    if args.sleep is not None:
        asleep(args.sleep / 1000, args.steps)
        return
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this needs two cores")
    core = sorted(os.sched_getaffinity(0))[1]
    chip = cpu_ranks(2)
    one = replace(chip, gpus=1, node=1)
    slow = replace(
        one.chip,
        name="half as fast",
        tflops={dtype: peak / 2 for dtype, peak in one.chip.tflops.items()},
        memory_bandwidth=one.chip.memory_bandwidth / 2,
    )
    mixed = together([one, replace(one, chip=slow)])
    question = Question(SPEC, mixed, TOKENS, BATCH, "float32")
    with RankPool(2) as pool:
        print(f"{'strategy':26} {'alike':>8} {'one slow':>9} {'predicted':>10}")
        for text, micro_batch in STRATEGIES:
            strategy = Strategy.parse(text, 2)
            micro_steps = strategy.micro_steps(BATCH, micro_batch)
            case = Case(SPEC, text, 2, "float32", micro_steps, args.steps, BATCH, TOKENS)
            alike = max(pool.run(timed, 2, case))
            loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
            spinning = subprocess.Popen([sys.executable, "-c", loop])
            try:
                uneven = max(pool.run(timed, 2, case))
            finally:
                spinning.kill()
                spinning.wait()
            predicted = estimate(question, strategy, micro_batch).step_s
            print(f"{text:26} {alike:8.3f} {uneven:9.3f} {predicted:10.3f}", flush=True)
    best = search(question).best
    assert best is not None
    print(f"planned for one chip and one half as fast: {best.strategy}, micro-batch {best.micro_batch}")


if __name__ == "__main__":
    main()
