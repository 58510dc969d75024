"""The command line with several processes on one GPU: they share it when asked to, and say so; else they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.conftest import CommandLine


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_processes_that_share_a_gpu_say_so_and_train_like_one(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    gpus = torch.cuda.device_count()
    ranks = 2 * gpus
    # The pipeline's messages and the ring's go through host memory.
    strategy = f"parallel.strategy=dp={gpus} pp=2"
    shared = meshwright(
        "train", *tiny_run, "observe.tensorboard=false", "run.device=cuda-shared", strategy, "run.dir=shared"
    )
    assert shared.returncode == 0, shared.stderr
    assert f"{ranks} processes over gloo on cuda:0" in shared.stdout
    assert f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} over gloo: right results, not speed" in shared.stdout
    alone = meshwright(
        "train", *tiny_run, "observe.tensorboard=false", "run.device=cuda", "run.dir=alone", "parallel.strategy=dp=1"
    )
    assert alone.returncode == 0, alone.stderr
    assert "share" not in alone.stdout
    for ours, theirs in zip(losses(tmp_path / "shared"), losses(tmp_path / "alone"), strict=True):
        assert abs(ours - theirs) <= 1e-4 * theirs
    plan = json.loads((tmp_path / "shared/plan.json").read_text())
    assert "cuda-shared" in plan["expected"]["unknown"]


def test_more_processes_than_gpus_are_refused_unless_they_may_share(
    meshwright: CommandLine, tiny_run: list[str]
) -> None:
    ranks = 2 * torch.cuda.device_count()
    refused = meshwright("train", *tiny_run, "run.device=cuda", f"parallel.strategy=dp={ranks}")
    assert refused.returncode != 0
    assert "has no GPU of its own" in refused.stderr
    assert "run.device=cuda-shared" in refused.stderr
    assert "Traceback" not in refused.stderr
