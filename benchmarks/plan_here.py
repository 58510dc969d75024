"""The planner against this machine's own cores: predicted and measured step times of real strategies on local ranks.

    meshwright plan --calibrate
    python benchmarks/plan_here.py [--steps 4]

Each strategy trains a small decoder for a few steps with the trainer's own step; the fastest step counts, since the
others measure what else the machine does. Prints both times and their rank correlation.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.cluster.cluster import cpu_ranks
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.planning.question import Question, estimate
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from published import rank_correlation

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
BATCH, TOKENS = 16, 128
STRATEGIES = (
    ("dp=1", 1, 8),
    ("dp=2", 2, 4),
    ("dp=2 zero=1", 2, 4),
    ("dp=2 zero=2", 2, 4),
    ("dp=2 zero=3", 2, 1),
    ("dp=1 tp=2", 2, 4),
    ("dp=1 pp=2", 2, 4),
    ("dp=1 cp=2", 2, 4),
    ("dp=2 recompute=full", 2, 4),
    ("dp=4", 4, 4),
    ("dp=4 zero=3", 4, 1),
    ("dp=2 tp=2", 4, 2),
    ("dp=1 tp=4", 4, 2),
    ("dp=1 pp=4", 4, 1),
    ("dp=8", 8, 2),
    ("dp=2 tp=4", 8, 2),
)
"""Short form, ranks, samples of a forward pass."""


def timed(world: World, case: Case) -> float:
    """Seconds of the fastest step on this rank."""
    step = step_of(world, case)
    best = float("inf")
    for number in range(case.steps):
        batch = batch_of(case, number, step.data_rank, step.strategy.dp)
        started = time.perf_counter()
        step(number, batch)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    pairs = []
    with RankPool(8) as pool:
        for text, ranks, micro_batch in STRATEGIES:
            strategy = Strategy.parse(text, ranks)
            micro_steps = BATCH // strategy.dp // micro_batch
            case = Case(SPEC, text, ranks, "float32", micro_steps, args.steps, BATCH, TOKENS)
            measured = max(pool.run(timed, ranks, case))
            question = Question(SPEC, cpu_ranks(ranks), TOKENS, BATCH, "float32")
            predicted = estimate(question, strategy, micro_batch).step_s
            pairs.append((predicted, measured))
            print(f"{text:24} {ranks} ranks  predicted {predicted:7.3f} s  measured {measured:7.3f} s", flush=True)
    print(f"rank correlation over {len(pairs)} strategies: {rank_correlation(pairs):.2f}")


if __name__ == "__main__":
    main()
