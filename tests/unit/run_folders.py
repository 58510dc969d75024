"""A run folder as a run would leave it, for tests of what is shown of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP_S = 0.5
PARTS = {"data": 0.01, "forward": 0.15, "backward": 0.25, "reduce": 0.04, "optimizer": 0.04, "hooks": 0.01}


def write_lines(path: Path, lines: list[dict[str, Any]], rest: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def make_run(
    folder: Path,
    *,
    world: int = 4,
    steps: int = 100,
    began: float = 1_700_000_000.0,
    slow: Mapping[int, str] | None = None,
    events: list[dict[str, Any]] | None = None,
    profiled: bool = True,
) -> Path:
    """The folder of a run that has done some of its 400 steps: of a pipeline of two stages."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[train]\nsteps = 400\n[model]\npreset = "tiny"\n')
    (folder / "run.json").write_text('{"run": "0"}')
    os.utime(folder / "run.json", (began - 5, began - 5))
    start = {"time": began, "event": "started", "step": 0, "strategy": f"pp=2 dp={world // 2}", "ranks": world}
    metrics = []
    for step in range(1, steps + 1):
        line = {"step": step, "time": began + 2 + step * STEP_S, "step_s": STEP_S, "tokens": 4096}
        line |= {"loss": 2 + 8 * math.exp(-step / 30), "tokens_per_s": 8192.0, "grad_norm": 1.0, "lr": 1e-3}
        metrics.append(line)
    write_lines(folder / "metrics.jsonl", metrics)
    found = [
        {"time": began + 2 + steps * STEP_S, "event": "straggler", "rank": rank, "phase": phase, "step": steps}
        | {"host": "node-7", "relative": 3.1, "own": 2.9}
        for rank, phase in (slow or {}).items()
    ]
    write_lines(folder / "events.jsonl", [start, *found, *(events or [])])
    for rank in range(world):
        place = {"pp": rank // (world // 2), "dp": rank % (world // 2), "cp": 0, "tp": 0, "ep": 0}
        lines: list[dict[str, Any]] = [
            {"kind": "rank", "rank": rank, "host": "node-7", "pid": os.getpid(), "world": world}
            | {"time": began, "coordinates": place, "device": "cpu"}
        ]
        for step in range(max(1, steps - 20), steps + 1):
            line = {"kind": "step", "step": step, "time": began + 2 + step * STEP_S, "seconds": STEP_S, "parts": PARTS}
            line["memory"] = {"rss": 3 << 30}
            if profiled and step % 10 == 0:
                line |= {"profiled": True, "communication": {"exposed": 0.1, "overlapped": 0.1}, "compute": 0.3}
                line |= {"bubble": 0.05, "exposed_in": {"backward": 0.1}, "bubble_in": {"forward": 0.05}}
            lines.append(line)
        write_lines(folder / "ranks" / f"{rank:05d}.jsonl", lines)
    return folder
