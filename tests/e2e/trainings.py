"""Trainings from the command line: started, followed while they run, read afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwright", "train", *arguments]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len(metrics_so_far(run)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metrics_so_far(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()
