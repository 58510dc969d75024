"""`parallel.strategy=auto`: planned at the start, compared at the end, known to the next plan. Real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def plan_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def test_what_a_run_has_shown_is_in_the_next_plan(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [*tiny_run, "--nproc", 2, "train.steps=60", "train.eval_sequences=0", "parallel.strategy=auto zero=3"]
    first = meshwright("train", *arguments, "run.dir=runs/a")
    assert first.returncode == 0, first.stderr
    plan = plan_of(tmp_path / "runs/a")
    assert plan["strategy"] == "dp=2 zero=3"
    assert plan["expected"]["origin"] == "estimated"
    measured = plan["measured"]
    beyond = measured["step_time_s"] / plan["expected"]["step_time_s"] - 1
    assert measured["beyond_expected"]["step_time"] == pytest.approx(beyond, rel=1e-3)
    assert 0.1 < measured["peak_gib"] < 4
    told = next(line for line in first.stdout.splitlines() if line.startswith("prediction"))
    assert f"a step {measured['step_time_s']:.3g} s, predicted" in told
    second = meshwright("train", *arguments, "run.dir=runs/b")
    assert second.returncode == 0, second.stderr
    again = plan_of(tmp_path / "runs/b")
    assert again["expected"]["origin"] == "measured"
    assert again["expected"]["step_time_s"] == pytest.approx(measured["step_time_s"], rel=1e-3)
    assert "measured in an earlier run here" in second.stdout


def test_a_run_that_goes_on_keeps_what_it_was_planned_with(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "--nproc", 2, "run.dir=runs/a", "train.steps=3").returncode == 0
    plan = plan_of(tmp_path / "runs/a")
    plan |= {"strategy": "dp=1 tp=2", "micro_batch": 2}
    (tmp_path / "runs/a/plan.json").write_text(json.dumps(plan))
    result = meshwright("train", *tiny_run, "--nproc", 2, "run.dir=runs/a", "train.steps=6")
    assert result.returncode == 0, result.stderr
    assert "auto: dp=1 tp=2, as this run's plan.json has it" in result.stdout
    manifest = json.loads((tmp_path / "runs/a/checkpoints/step-000006/manifest.json").read_text())
    assert manifest["strategy"] == "dp=1 tp=2"
    assert 'strategy = "auto"' in (tmp_path / "runs/a/config.toml").read_text()


def test_ranks_of_a_launcher_take_the_first_one_s_answer(tiny_run: list[str], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "meshwright", "train", *tiny_run, "run.dir=runs/a", "train.steps=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plan = plan_of(tmp_path / "runs/a")
    assert plan["question"]["ranks"] == 2
    assert done.stdout.count(f"plan   auto: {plan['strategy']}") == 1


def test_a_home_that_cannot_be_written_ends_no_training(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    home = tmp_path / "cache"
    home.write_text("a file where a folder should be")
    settings = [*tiny_run, "run.dir=runs/a", "train.steps=26", "train.eval_sequences=0"]
    result = meshwright("train", *settings, XDG_CACHE_HOME=str(home))
    assert result.returncode == 0, result.stderr
    assert "not kept for later plans" in result.stderr


@pytest.mark.parametrize("setting", ["comm.allreduce=ring", "parallel.placement=replicate"])
def test_auto_trains_with_settings_that_refuse_the_fastest_strategy(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    # What is fastest is the estimate's word here, not that of runs which other tests have measured.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = meshwright("train", *tiny_run, "--nproc", 2, "run.dir=runs/a", "train.steps=2", setting)
    assert result.returncode == 0, result.stderr
    plan = plan_of(tmp_path / "runs/a")
    assert plan["strategy"] in ("dp=2", "dp=2 zero=1")
    assert "zero=2" in plan_of_free(meshwright, tiny_run, tmp_path)


def plan_of_free(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> str:
    """What auto takes without the setting."""
    result = meshwright("train", *tiny_run, "--nproc", 2, "run.dir=runs/free", "train.steps=1")
    assert result.returncode == 0, result.stderr
    return str(plan_of(tmp_path / "runs/free")["strategy"])
