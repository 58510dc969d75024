"""The planner on one GPU: calibrates it, then compares predicted and measured steps of a few models.

    python benchmarks/plan_gpu.py [--json FILE]
    python benchmarks/plan_gpu.py --csv benchmarks/data/gpu_settings.csv [--out FILE]    # that table's settings

Prints what the calibration measured (it is stored as `meshwright plan --calibrate` does it), and for each model the
step time with the constants that come with the package, with those measured here, and the real one of the trainer's
own step; and the peak memory, predicted and real. With --csv the same of a table of settings, by the constants that
come with the package; --out writes it with what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu_rows import Row, read_rows, scenario_of, write_rows
from meshwright._version import __version__
from meshwright.cluster.cluster import parse_cluster
from meshwright.models.presets import preset
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.world import join_world
from meshwright.planning.calibrate import calibrate, lines_of
from meshwright.planning.memory import memory_of
from meshwright.planning.origin import origin
from meshwright.planning.question import Question, estimate
from meshwright.planning.software import constants
from meshwright.planning.state_memory import GIB
from meshwright.planning.timing import Timer
from meshwright.strategy import Strategy
from meshwright.training.out_of_memory import is_out_of_memory
from meshwright.verify.parity import Case, batch_of, step_of


def shape(width: int, layers: int, head: int, vocabulary: int = 32768, experts: Experts | None = None) -> ModelSpec:
    """A decoder with a quarter as many heads for keys as for queries."""
    heads = width // head
    return ModelSpec(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=head,
        max_position_embeddings=8192,
        experts=experts,
    )


CASES = (
    ("512 wide, 8 layers", shape(512, 8, 64), 1024, 4, 2, "none"),
    ("2048 wide, 16 layers", shape(2048, 16, 64), 2048, 4, 2, "none"),
    ("2048 wide, 16 layers, recomputed", shape(2048, 16, 64), 2048, 8, 1, "full"),
    ("4096 wide, 6 layers", shape(4096, 6, 128), 4096, 2, 2, "none"),
    ("4096 wide, 6 layers, long", shape(4096, 6, 128), 8192, 1, 1, "selective"),
    (
        "1024 wide, 8 layers of experts",
        shape(1024, 8, 64, experts=Experts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=2048)),
        2048,
        4,
        1,
        "none",
    ),
    ("llama3.2-1b", preset("llama3.2-1b"), 2048, 4, 1, "none"),
)
"""Name, shape, tokens, samples of a forward pass, micro-steps, recompute."""


def settings_of(row: Row) -> dict[str, dict[str, object]]:
    """What a row says of the run's settings."""
    kept: dict[str, object] = {name: row[name] for name in ("stored", "moments") if row.get(name)}
    return {"train": {"compile": row["compile"], "precision": row.get("precision") or "bf16"}, "precision": kept}


def measured(
    spec: ModelSpec,
    tokens: int,
    micro_batch: int,
    micro_steps: int,
    recompute: str,
    settings: dict[str, dict[str, object]] | None = None,
) -> tuple[float, float]:
    """Seconds of a step and the most bytes in use."""
    text = f"dp=1 recompute={recompute}"
    with join_world("cuda", 120.0) as world:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        case = Case(
            spec, text, 1, "bf16", micro_steps, 8, micro_batch * micro_steps, tokens, settings=dict(settings or {})
        )
        step = step_of(world, case)
        seconds = []
        for number in range(case.steps):
            batch = batch_of(case, number, 0, step.strategy)
            torch.cuda.synchronize()
            started = time.perf_counter()
            step(number, batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = float(torch.cuda.max_memory_allocated())
        del step
        # What is left of it in cycles would count as the next one's.
        gc.collect()
        torch.cuda.empty_cache()
    return statistics.median(seconds[2:]), peak


def compare_rows(path: Path, out: Path | None) -> None:
    """Peaks and steps of the settings in a table, planned without calibration and measured."""
    done: list[Row] = []
    near_peaks = near_times = 0
    for row in read_rows(path):
        length, size, steps = (int(row[name]) for name in ("sequence_length", "micro_batch", "micro_steps"))
        scenario = scenario_of(row)
        allocated, planned_s = memory_of(scenario).stages[0].allocated, Timer(scenario, constants()).parts().total
        kinds = " ".join(f"{row.get(name) or '':7}" for name in ("precision", "stored", "moments"))
        named = (
            f"{row['model']:14} {row['layers']:>3} layers {length:6} x {size} x {steps} {row['recompute']:10} {kinds} "
        )
        torch._dynamo.reset()
        try:
            seconds, peak = measured(scenario.spec, length, size, steps, row["recompute"], settings_of(row))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"{named}out of memory; planned {allocated / 2**20:.0f} MiB", flush=True)
            continue
        peak_off, time_off = allocated / peak - 1, planned_s / seconds - 1
        near_peaks += abs(peak_off) <= 0.05
        near_times += abs(time_off) <= 0.1
        print(
            f"{named}peak {peak / 2**20:7.0f} MiB, planned {peak_off:+.1%}; "
            f"step {1e3 * seconds:6.1f} ms, planned {time_off:+.0%}",
            flush=True,
        )
        done.append(row | {"step_ms": f"{1e3 * seconds:.1f}", "peak_allocated_mib": f"{peak / 2**20:.0f}"})
        if out is not None:
            write_rows(out, done, provenance())
    print(f"of {len(done)}: peaks within 5% {near_peaks}, steps within 10% {near_times}")


def provenance() -> list[str]:
    """Date, card, versions and command."""
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, meshwright {__version__}",
        f"python {' '.join(sys.argv)}",
    ]


def main() -> None:
    """Calibrate, predict, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all times")
    parser.add_argument("--csv", type=Path, help="compare the settings of such a table instead")
    parser.add_argument("--out", type=Path, help="with --csv: write that table with what was measured")
    args = parser.parse_args()
    if args.csv is not None:
        compare_rows(args.csv, args.out)
        return
    found, path = calibrate("cuda", say=lambda line: print(line, flush=True))
    print("\n".join(lines_of(found)))
    print(f"wrote {path}\n")
    cluster = parse_cluster(f"1x{found.chip}")
    plain = replace(cluster, speeds=None, measured="")
    errors: dict[str, list[float]] = {"before": [], "after": []}
    rows = []
    for name, spec, tokens, micro_batch, micro_steps, recompute in CASES:
        strategy = Strategy.parse(f"dp=1 recompute={recompute}", 1)
        batch = micro_batch * micro_steps
        before, after = (
            estimate(Question(spec, one, tokens, batch, "bf16"), strategy, micro_batch) for one in (plain, cluster)
        )
        seconds, peak = measured(spec, tokens, micro_batch, micro_steps, recompute)
        errors["before"].append(before.step_s / seconds - 1)
        errors["after"].append(after.step_s / seconds - 1)
        allocated = max(stage.allocated for stage in after.memory.stages)
        parts = " ".join(f"{part} {1e3 * value:.1f}" for part, value in vars(after.parts).items() if value > 1e-4)
        print(
            f"{name:34} measured {1e3 * seconds:7.1f} ms; fitted constants {1e3 * before.step_s:7.1f} "
            f"({before.step_s / seconds - 1:+.0%}), calibrated {1e3 * after.step_s:7.1f} "
            f"({after.step_s / seconds - 1:+.0%}) = {parts}; memory {allocated / GIB:.2f} predicted, "
            f"{peak / GIB:.2f} GiB measured",
            flush=True,
        )
        rows.append(
            {
                "name": name,
                "measured_s": seconds,
                "fitted_s": before.step_s,
                "calibrated_s": after.step_s,
                "parts": vars(after.parts),
                "allocated_gib": allocated / GIB,
                "measured_gib": peak / GIB,
            }
        )
    for when, those in errors.items():
        told = sorted(abs(one) for one in those)
        print(f"{when} calibration: median error {told[len(told) // 2]:.1%}, largest {told[-1]:.1%}")
    many = Question(CASES[1][1], parse_cluster(f"64x{found.chip}"), 2048, 64)
    print(f"origin of a plan for 64 of them: {origin(many)}")
    if args.json:
        args.json.write_text(json.dumps({"calibration": str(path), "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
