"""The planner against this machine's own cores: predicted and measured step times of real strategies on local ranks.

    meshwright plan --calibrate
    python benchmarks/plan_here.py [--steps 4] [--only experts] [--json FILE]

Each strategy trains a small decoder for a few steps with the trainer's own step; the median step counts. Prints both
times, the parts of the predicted one, and the rank correlation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.cluster.cluster import cpu_ranks
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.world import World
from meshwright.planning.question import Question, estimate
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from published import rank_correlation

DENSE = ModelSpec(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=256,
)
SPARSE = DENSE.model_copy(update={"experts": Experts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)})
BATCH, TOKENS = 16, 128
STRATEGIES = (
    ("dp=1", 1, 4),
    ("dp=1 recompute=full", 1, 8),
    ("dp=2", 2, 4),
    ("dp=2 zero=1", 2, 1),
    ("dp=2 zero=2", 2, 2),
    ("dp=2 zero=3", 2, 1),
    ("dp=1 tp=2", 2, 4),
    ("dp=1 tp=2 sp=off", 2, 1),
    ("dp=1 pp=2", 2, 4),
    ("dp=1 pp=2 schedule=zero-bubble", 2, 1),
    ("dp=1 cp=2", 2, 4),
    ("dp=1 cp=2 cp_method=ulysses", 2, 2),
    ("dp=2 recompute=full", 2, 4),
    ("dp=4", 4, 4),
    ("dp=4 zero=3", 4, 1),
    ("dp=2 tp=2", 4, 2),
    ("dp=1 tp=4", 4, 2),
    ("dp=1 pp=4", 4, 1),
    ("dp=2 pp=2 schedule=interleaved:2", 4, 2),
    ("dp=8", 8, 2),
    ("dp=4 zero=3 recompute=full tp=2", 8, 4),
    ("dp=2 tp=4", 8, 4),
    ("dp=2 ep=2", 2, 4),
    ("dp=4 ep=4 zero=1", 4, 2),
)
"""Short form, ranks, samples of a forward pass; those with ep train a mixture of experts."""


def timed(world: World, case: Case) -> list[float]:
    """Seconds of each step on this rank, the first one not counted."""
    step = step_of(world, case)
    found = []
    for number in range(case.steps):
        batch = batch_of(case, number, step.data_rank, step.strategy)
        started = time.perf_counter()
        step(number, batch)
        found.append(time.perf_counter() - started)
    return found[1:]


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="strategies whose short form has this in it")
    parser.add_argument("--json", type=Path, help="write both times of every strategy")
    parser.add_argument("--measured", type=Path, help="take measured times from such a file")
    args = parser.parse_args()
    known = json.loads(args.measured.read_text()) if args.measured else {}
    pairs, written = [], {}
    with RankPool(8) as pool:
        for text, ranks, micro_batch in STRATEGIES:
            if args.only not in text:
                continue
            strategy = Strategy.parse(text, ranks)
            spec = SPARSE if strategy.ep > 1 else DENSE
            micro_steps = BATCH // strategy.dp // micro_batch
            case = Case(spec, text, ranks, "float32", micro_steps, args.steps, BATCH, TOKENS)
            if text in known:
                measured = known[text]["measured_s"]
            else:
                measured = max(statistics.median(one) for one in pool.run(timed, ranks, case))
            question = Question(spec, cpu_ranks(ranks), TOKENS, BATCH, "float32")
            candidate = estimate(question, strategy, micro_batch)
            predicted = candidate.step_s
            pairs.append((predicted, measured))
            written[text] = {"predicted_s": predicted, "measured_s": measured}
            parts = " ".join(f"{name} {value:.3f}" for name, value in vars(candidate.parts).items() if value >= 5e-4)
            print(
                f"{text:32} {ranks} ranks x {micro_steps:2}  predicted {predicted:7.3f} s  measured {measured:7.3f} s "
                f"{predicted / measured - 1:+5.0%}   {parts}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    errors = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
    print(f"median error of step time: {errors[len(errors) // 2]:.0%}")
    print(f"rank correlation over {len(pairs)} strategies: {rank_correlation(pairs):.2f}")


if __name__ == "__main__":
    main()
