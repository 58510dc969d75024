"""Run folders without a training: files as a run writes them, for tests of what reads them.

    folder = write_run(tmp_path / "run", "dp=2 pp=2 schedule=1f1b", world=4, steps=50)

`append_steps` goes on with such a folder, `append` adds a line of any kind. Numbers follow from the seed alone.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.schedules import make_program, simulate
from meshwright.strategy import Strategy

GIB = 2.0**30
PARTS = {
    "data": 0.01,
    "forward": 0.26,
    "backward": 0.49,
    "reduce": 0.1,
    "optimizer": 0.08,
    "hooks": 0.02,
    "unattributed": 0.04,
}
MICRO_BATCHES = 8


def append(path: Path, *lines: Mapping[str, Any]) -> None:
    """Add lines to a .jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_run(
    folder: Path,
    strategy: str = "dp=2 pp=2",
    *,
    world: int = 4,
    steps: int = 60,
    planned_steps: int | None = None,
    step_s: float = 0.5,
    end: str | None = "finished",
    ranks: bool = True,
    profile_every: int = 25,
    pid: int | None = None,
    began: float | None = None,
    seed: int = 0,
    chip: str | None = None,
) -> Path:
    """A run folder with that many steps done; `end` is the event it ends with, `pid` who holds its lock."""
    split = Strategy.parse(strategy, world)
    began = time.time() - steps * step_s - 5 if began is None else began
    folder.mkdir(parents=True, exist_ok=True)
    total = planned_steps or steps
    (folder / "config.toml").write_text(f'[train]\nsteps = {total}\n\n[parallel]\nstrategy = "{strategy}"\n')
    (folder / "run.json").write_text('{"run": "0123456789abcdef"}\n')
    fence = {"launch": "l", "generation": 0, "host": socket.gethostname(), "pid": pid or os.getpid()}
    (folder / ".lock").write_text(json.dumps(fence).ljust(512) + "\n")
    (folder / "plan.json").write_text(json.dumps(_plan(split, strategy, world, step_s), indent=1))
    append(
        folder / "events.jsonl",
        {"time": began, "event": "started", "step": 0, "strategy": str(split), "ranks": world, "device": "cpu"},
    )
    if ranks:
        for rank in range(world):
            append(folder / f"ranks/{rank:05d}.jsonl", _rank_line(split, rank, world, began, pid, chip))
    append_steps(folder, split, 1, steps, began=began + 2, step_s=step_s, ranks=ranks, seed=seed, every=profile_every)
    last = began + 2 + steps * step_s
    for step in range(50, steps + 1, 50):
        facts = {"step": step, "path": f"step-{step:06d}", "seconds": 0.4, "stalled_s": 0.05, "bytes": 37_088_412}
        append(folder / "events.jsonl", {"time": began + 2 + step * step_s, "event": "checkpoint", **facts})
    if end is not None:
        append(folder / "events.jsonl", {"time": last + 0.5, "event": end, "step": steps, "reason": None})
    return folder


def append_steps(
    folder: Path,
    split: Strategy,
    first: int,
    last: int,
    *,
    began: float,
    step_s: float = 0.5,
    ranks: bool = True,
    seed: int = 0,
    every: int = 25,
) -> None:
    """Records of steps; every so many of them profiled."""
    draw = random.Random(seed * 1_000_003 + first)
    world = split.world
    metrics, of_ranks = [], {rank: [] for rank in range(world)}
    for step in range(first, last + 1):
        ended, seconds = began + step * step_s, step_s * draw.uniform(0.92, 1.12)
        metrics.append(_metrics(step, ended, seconds, world, split, draw))
        for rank in of_ranks if ranks else ():
            of_ranks[rank].append(_step_line(step, ended, seconds, rank, split, step % every == 0, draw))
    append(folder / "metrics.jsonl", *metrics)
    profiled = [step for step in range(first, last + 1) if step % every == 0]
    for rank, lines in of_ranks.items():
        if lines:
            append(folder / f"ranks/{rank:05d}.jsonl", *lines)
        for step in profiled if ranks else ():
            append(folder / f"ranks/{rank:05d}.jsonl", _collectives(step, split))
            append(folder / f"ranks/{rank:05d}.spans.jsonl", _spans(step, rank, split, step_s, draw))


def place(split: Strategy, rank: int) -> dict[str, int]:
    """A rank's coordinates."""
    rest, tp = divmod(rank, split.tp)
    rest, cp = divmod(rest, split.cp)
    pp, dp = divmod(rest, split.dp)
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": dp % split.ep}


def _rank_line(split: Strategy, rank: int, world: int, began: float, pid: int | None, chip: str | None) -> dict:
    return {
        "kind": "rank",
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid or os.getpid(),
        "generation": 0,
        "time": began,
        "device": "cuda:0" if chip else "cpu",
        "chip": chip,
        "world": world,
        "coordinates": place(split, rank),
        "strategy": str(split),
        "monotonic": 1000.0,
        "memory_kinds": {"parameters": 0.42 * GIB, "gradients": 0.42 * GIB, "optimizer": 0.85 * GIB},
    }


def _metrics(step: int, ended: float, seconds: float, world: int, split: Strategy, draw: random.Random) -> dict:
    loss = 1.9 + 3.8 * math.exp(-step / 60) + draw.gauss(0, 0.04)
    tokens = 4096 * world
    line = {
        "step": step,
        "loss": loss,
        "loss_max": loss + abs(draw.gauss(0, 0.06)),
        "grad_norm": 0.8 + 2 * math.exp(-step / 40) + abs(draw.gauss(0, 0.1)),
        "lr": 1e-3 * min(1, step / 20),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_device": tokens / seconds / world,
        "tflops_per_device": 210 / seconds,
        "mfu": 0.21 / seconds,
        "step_s": seconds,
        "time": ended,
    }
    if step % 20 == 0:
        line |= {"eval_loss": loss + 0.08, "eval_s": 0.3}
    if split.pp > 1:
        line |= {"pipeline_idle": 0.2 + draw.gauss(0, 0.01), "pipeline_idle_predicted": 0.18}
    return line


def _step_line(
    step: int, ended: float, seconds: float, rank: int, split: Strategy, profiled: bool, draw: random.Random
) -> dict:
    shares = {name: share * draw.uniform(0.9, 1.1) for name, share in PARTS.items()}
    if profiled:
        shares |= {"communication": 0.12, "bubble": 0.15 if split.pp > 1 else 0.0}
        shares |= {"forward": shares["forward"] * 0.7, "backward": shares["backward"] * 0.7}
    whole = sum(shares.values())
    line: dict[str, Any] = {
        "kind": "step",
        "step": step,
        "time": ended,
        "seconds": seconds,
        "parts": {name: share / whole * seconds for name, share in shares.items()},
        "memory": {"rss": (2.6 + 0.15 * math.sin(rank)) * GIB},
    }
    if profiled:
        exposed, bubble = line["parts"]["communication"], line["parts"]["bubble"]
        line |= {"profiled": True, "communication": {"exposed": exposed, "overlapped": 0.08 * seconds}}
        line |= {"bubble": bubble, "compute": (0.3 if rank % 8 == 5 else 0.6) * seconds, "idle": 0.13 * seconds}
        line |= {"exposed_in": {"backward": exposed}, "bubble_in": {"forward": bubble}}
    return line


def _collectives(step: int, split: Strategy) -> dict:
    rows = [
        {"group": "dp", "operation": "all_reduce", "size": "1-4 MiB", "count": 6, "bytes": 15_728_640, "seconds": 0.031,
         "algorithm_gb_s": 0.51, "bus_gb_s": 0.76},
        {"group": "dp", "operation": "reduce_scatter", "size": "4-16 MiB", "count": 4, "bytes": 41_943_040,
         "seconds": 0.052, "algorithm_gb_s": 0.81, "bus_gb_s": 0.61},
    ]  # fmt: skip
    if split.tp > 1:
        rows.append({"group": "tp", "operation": "all_gather", "size": "256 KiB-1 MiB", "count": 48,
                     "bytes": 25_165_824, "seconds": 0.012, "algorithm_gb_s": 2.1, "bus_gb_s": 1.05})  # fmt: skip
    if split.pp > 1:
        rows.append({"group": "pp", "operation": "send", "size": "256 KiB-1 MiB", "count": 16, "bytes": 8_388_608,
                     "seconds": 0.006, "algorithm_gb_s": 1.4, "bus_gb_s": 1.4})  # fmt: skip
    return {"kind": "collectives", "step": step, "rows": rows}


def _spans(step: int, rank: int, split: Strategy, step_s: float, draw: random.Random) -> dict:
    spans: list[list[Any]] = []
    if split.pp > 1:
        unit = step_s / (3 * MICRO_BATCHES + 3 * split.pp)
        program = make_program(split.schedule, split.pp, MICRO_BATCHES)
        usual = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        jitter = random.Random(step)
        transfers = [unit / 6] * split.pp
        timeline = simulate(program, lambda action: usual[action.kind] * unit * jitter.uniform(0.85, 1.3), transfers)
        for action, start, end in timeline.spans[place(split, rank)["pp"]]:
            name = f"{action.kind} stage {action.stage} micro-batch {action.micro}"
            spans.append([name, "forward" if action.kind == "F" else "backward", 500 + start, 500 + end])
    spans.append(["all_reduce dp 4.0 MiB", "collective", 500 + step_s * 0.9, 500 + step_s * 0.95])
    return {"step": step, "begin": 500.0, "unix": 1_700_000_000.0, "spans": spans}


def _plan(split: Strategy, strategy: str, world: int, step_s: float) -> dict:
    terms = {"parameters": 0.42, "gathered": 0.1, "gradients": 0.42, "optimizer": 0.84, "attention": 0.2,
             "feed_forward": 0.31, "layer_inputs": 0.02, "working": 0.05, "logits": 0.11, "buffers": 0.01,
             "fragmentation": 0.04, "communicators": 0.02, "context": 0.3, "correction": 0.0}  # fmt: skip
    stage = {"peak_gib": 2.84, "capacity_gib": 6.0, "margin_gib": 3.16, "verdict": "fits", "terms": terms}
    memory = {"peak_gib": 2.84, "fullest_stage": 0, "terms": terms, "by_stage": [stage] * split.pp}
    return {
        "schema": 1,
        "question": {"strategy": strategy, "ranks": world, "batches": [MICRO_BATCHES * split.dp]},
        "strategy": strategy,
        "micro_batch": 1,
        "expected": {
            "strategy": strategy,
            "micro_batch": 1,
            "gpus": world,
            "memory": memory,
            "step_time_s": step_s * 0.94,
            "step_time": {"compute": step_s * 0.6, "dp": step_s * 0.08, "bubble": step_s * 0.16 * (split.pp > 1),
                          "optimizer": step_s * 0.06, "other": step_s * 0.04},
            "tokens_per_s_per_gpu": 4096 / (step_s * 0.94),
            "mfu": 0.41,
        },
        "measured": None,
    }  # fmt: skip
