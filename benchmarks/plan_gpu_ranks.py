"""The planner's peaks of several ranks against real ones: two and four ranks share one GPU, each with its own peak.

    python benchmarks/plan_gpu_ranks.py [--csv FILE] [--only TEXT]

Every rank trains three steps with the trainer's own step and says the most bytes that PyTorch had given out to it,
which `plan` calls allocated. Ranks talk over gloo, so that one card is enough; times say nothing and are not compared.
What gloo does otherwise than NCCL on the card itself: its reduce-scatter (zero=2, 3) sums a copy of what it is given.
Rows are added to benchmarks/results/gpu_ranks.csv.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.cluster.cluster import parse_cluster, this_machine
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.world import World
from meshwright.planning.question import Question, estimate
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from plan_gpu import shape

RESULTS = Path(__file__).parent / "results" / "gpu_ranks.csv"
TOKENS, MICRO_BATCH, STEPS = 2048, 4, 3
MIB = 2.0**20
MODELS = {
    "dense": shape(1024, 8, 64),
    "experts": shape(1024, 8, 64, experts=Experts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024)),
}
STRATEGIES = (
    ("dense", "dp=2"),
    ("dense", "dp=2 compress=bf16"),
    ("dense", "dp=2 compress=int8"),
    ("dense", "dp=2 compress=powersgd:4"),
    ("dense", "dp=2 compress=topk:0.01"),
    ("dense", "dp=4 compress=int8"),
    ("dense", "dp=2 zero=1"),
    ("dense", "dp=2 zero=2"),
    ("dense", "dp=2 zero=3"),
    ("dense", "dp=2 zero=3 recompute=full"),
    ("dense", "dp=1 tp=2"),
    ("dense", "dp=1 pp=2"),
    ("dense", "dp=1 cp=2"),
    ("dense", "dp=1 cp=2 cp_method=ulysses"),
    ("experts", "dp=2 ep=2 zero=1"),
    ("dense", "dp=4 zero=3"),
    ("dense", "dp=4 zero=2 replicate=2"),
    ("dense", "dp=1 tp=4"),
    ("dense", "dp=2 tp=2 zero=3"),
    ("dense", "dp=1 pp=4"),
    ("dense", "dp=2 pp=2 zero=1 schedule=interleaved:2"),
    ("dense", "dp=1 pp=2 tp=2 schedule=zero-bubble"),
    ("dense", "dp=1 cp=4"),
    ("experts", "dp=4 ep=4 zero=3"),
)


class Measured(NamedTuple):
    """What one rank saw."""

    pipeline_rank: int
    before: int
    """Bytes that were in use before, left by earlier work."""
    peak: int


def measure(world: World, case: Case) -> Measured:
    """Train some steps on this rank."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = step_of(world, case)
    for number in range(case.steps):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    pipeline = step.parallel.pipeline
    return Measured(pipeline.rank if pipeline is not None else 0, before, torch.cuda.max_memory_allocated())


def case_of(spec: ModelSpec, strategy: Strategy) -> Case:
    """Twice as many micro-batches as stages in a row, so that a pipeline fills up; else two."""
    micro_steps = 2 * strategy.pp
    batch = MICRO_BATCH * micro_steps * strategy.dp
    settings: dict[str, dict[str, object]] = {"comm": {"compress_after": 0}}
    return Case(spec, str(strategy), strategy.world, "bf16", micro_steps, STEPS, batch, TOKENS, settings=settings)


def planned(case: Case, strategy: Strategy, chip: str) -> list[float]:
    """The bytes that the planner expects of each pipeline rank."""
    question = Question(case.spec, parse_cluster(f"{strategy.world}x{chip}"), TOKENS, case.batch, case.precision)
    return [stage.allocated for stage in estimate(question, strategy, MICRO_BATCH).memory.stages]


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Add rows to a table, with its heading where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        if new:
            table.writeheader()
        table.writerows(rows)


def main() -> None:
    """Measure, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS, help="the table that rows are added to")
    parser.add_argument("--only", default="", help="strategies that have this in them")
    args = parser.parse_args()
    chosen = [(model, text) for model, text in STRATEGIES if args.only in text]
    if not chosen:
        parser.error(f"no strategy has '{args.only}' in it")
    chip, card = this_machine().chip.key, torch.cuda.get_device_name(0)
    about: dict[str, object] = {"date": datetime.now(UTC).date().isoformat(), "card": card, "torch": torch.__version__}
    started, errors = time.perf_counter(), []
    print(f"{card}, PyTorch {torch.__version__}: the most bytes of each pipeline rank that PyTorch gave out, in MiB")
    with RankPool(4, timeout_s=170.0, device="cuda-shared") as pool:
        for model, text in chosen:
            strategy = Strategy.parse(text, Strategy.processes(text) or 1)
            case = case_of(MODELS[model], strategy)
            expected, began = planned(case, strategy, chip), time.perf_counter()
            found = pool.run(measure, strategy.world, case)
            seconds = time.perf_counter() - began
            rows = []
            for rank, one in enumerate(found):
                peak, estimated = one.peak - one.before, expected[one.pipeline_rank]
                errors.append(estimated / peak - 1)
                rows.append(
                    about
                    | {"model": model, "strategy": text, "rank": rank, "pipeline_rank": one.pipeline_rank}
                    | {"micro_batch": MICRO_BATCH, "micro_steps": case.micro_steps, "sequence_length": TOKENS}
                    | {"measured_mib": round(peak / MIB), "planned_mib": round(estimated / MIB)}
                    | {"error": round(estimated / peak - 1, 4), "left_before_mib": round(one.before / MIB)}
                )
            write(args.csv, rows)
            told = {(row["pipeline_rank"], row["measured_mib"]): row for row in rows}.values()
            peaks = "; ".join(
                f"{row['measured_mib']} planned {row['planned_mib']} ({row['error']:+.1%})" for row in told
            )
            print(f"{model:8}{text:42}{seconds:6.1f} s  {peaks}", flush=True)
    sizes = [abs(error) for error in errors]
    print(
        f"{len(errors)} ranks in {time.perf_counter() - started:.0f} s: median error {statistics.median(sizes):.1%}, "
        f"largest {max(sizes):.1%}; rows added to {args.csv}"
    )


if __name__ == "__main__":
    main()
