"""`meshwright launch --on ray` and `meshwright.launch.ray.fit` on a real Ray of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.e2e.trainings import events, metrics
from tests.ray_cluster import growing_ray, ray_cluster

STEPS = 120


def heavy(test: Callable[..., None]) -> Callable[..., None]:
    """Ray's own processes take both cores: beside other tests these take minutes, and so do the others."""
    for mark in (pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with ray_cluster() as variables:
        yield variables


def _until(there: Callable[[], bool], told: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not there():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def _steps(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0


def _pid_of(run: Path, rank: int) -> int:
    lines = (run / f"ranks/{rank:05d}.jsonl").read_text().splitlines()
    return next(int(found["pid"]) for line in reversed(lines) if (found := json.loads(line))["kind"] == "rank")


def _fit(cluster: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """`tests.cluster.ray_fit`; what it says is in the folder's log."""
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, **cluster, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "tests.cluster.ray_fit", *words]
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)


@heavy
def test_workers_that_join_later_take_part_and_each_step_is_done_once(tiny_run: list[str], tmp_path: Path) -> None:
    settings = [*tiny_run, "train.steps=9000", "checkpoint.every=50", "run.device=cpu"]
    run = tmp_path / "grown"

    def told() -> str:
        return (tmp_path / "log").read_text()[-6000:]

    def ranks() -> list[int]:
        return [event["ranks"] for event in events(run) if "ranks" in event] if run.exists() else []

    with growing_ray() as (cluster, grow):
        fit = _fit(cluster, tmp_path, "1", "2", str(tmp_path / "storage"), *settings, f"run.dir={run}")
        _until(lambda: _steps(run) >= 60 or fit.poll() is not None, told)
        assert ranks() == [1], told()
        grow()
        _until(lambda: 2 in ranks() or fit.poll() is not None, told)
        assert ranks() == [1, 2], told()
        resumed = next(event["step"] for event in events(run) if event["event"] == "resumed")
        _until(lambda: _steps(run) >= resumed + 30 or fit.poll() is not None, told)
        assert fit.poll() is None, told()
        fit.kill()
        fit.wait(30)
    assert resumed >= 50
    assert resumed % 50 == 0, "it goes on from a checkpoint"
    assert [row["step"] for row in metrics(run)] == list(range(1, _steps(run) + 1))


@heavy
def test_a_killed_worker_is_started_again_and_the_run_is_that_of_one_without_a_kill(
    meshwright: CommandLine, cluster: dict[str, str], tiny_run: list[str], tmp_path: Path
) -> None:
    settings = [*tiny_run, f"train.steps={STEPS}", "train.eval_every=10", "checkpoint.every=10", "run.device=cpu"]
    settings += ["observe.log_every=5", "checkpoint.cpu_share=1", "parallel.strategy=dp=2", "checkpoint.keep=2"]
    run, storage = tmp_path / "killed", tmp_path / "storage"
    storage.mkdir()
    # Three workers cannot share a batch of eight: the third one stays idle and takes part in reports.
    fit = _fit(cluster, tmp_path, "2", "3", str(storage), *settings, f"run.dir={run}")

    def told() -> str:
        return (tmp_path / "log").read_text()[-6000:]

    _until(lambda: _steps(run) >= 25 or fit.poll() is not None, told)
    assert fit.poll() is None, told()
    checkpoints = run.glob("checkpoints/step-*/manifest.json")
    saved = max((int(path.parent.name[5:]) for path in checkpoints), default=10)
    os.kill(_pid_of(run, 1), signal.SIGKILL)
    assert fit.wait(240) == 0, told()
    undisturbed = meshwright("train", *settings, "run.dir=plain", "--nproc", "2")
    assert undisturbed.returncode == 0, undisturbed.stderr
    kinds = [event["event"] for event in events(run)]
    assert kinds.count("resumed") == 1
    assert kinds[-1] == "finished"
    resumed = next(event["step"] for event in events(run) if event["event"] == "resumed")
    # Steps go on until the signal arrives, and so do checkpoints.
    assert resumed in range(saved, STEPS, 10)
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in metrics(run)] == [row["loss"] for row in metrics(tmp_path / "plain")]
    found = json.loads(next(line for line in told().splitlines() if line.startswith("RESULT "))[7:])
    assert Path(found["path"]) == storage / "killed.ray"
    assert found["metrics"]["step"] == STEPS
    assert found["metrics"]["eval_loss"] == metrics(run)[-1]["eval_loss"]
    assert [Path(path).name for path, _ in found["kept"]] == [f"step-{STEPS - 10:06d}", f"step-{STEPS:06d}"]
    assert sorted(path.name for path in (storage / "killed.ray").glob("step-*")) == [
        Path(path).name for path, _ in found["kept"]
    ]
    # Ray's checkpoint is one of ours, and shares its bytes.
    verified = meshwright("checkpoint", "verify", found["checkpoint"])
    assert verified.returncode == 0, verified.stderr
    ours = run / f"checkpoints/step-{STEPS:06d}/model-00000.safetensors"
    assert ours.samefile(Path(found["checkpoint"]) / "model-00000.safetensors")
    reports = [json.loads(line) for line in Path(f"{run}.reports").read_text().splitlines()]
    logged = [report for report in reports if not report["saved"] and "loss" in report]
    assert {report["step"] for report in logged} == set(range(5, STEPS + 1, 5))
    losses = {row["step"]: row["loss"] for row in metrics(run)}
    assert all(report["loss"] == losses[report["step"]] for report in logged)
    assert {report["workers"] for report in reports} == {3}


def test_what_would_be_submitted_is_written(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    words = [
        "launch",
        *tiny_run,
        "run.dir=runs/dry",
        "--on",
        "ray",
        "--nproc",
        "2",
        "--env",
        "MODE=a b",
        "--ray-cpus",
        "2",
    ]
    told = meshwright(*words, "--nodes", "1:2", "--ray-address", "http://127.0.0.1:9", "--dry-run", "job")
    assert told.returncode == 0, told.stderr
    job = json.loads((tmp_path / "job/job.json").read_text())
    assert "--workers 2:4 --gpus auto --cpus 2 --env 'MODE=a b' --address auto" in job["entrypoint"]
    assert job["runtime_env"]["env_vars"]["MODE"] == "a b"
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"run.toml", "plan.json", "job.json"}
    assert meshwright(*words, "--dry-run", "here").returncode == 0
    assert "meshwright.launch.ray_main run.toml --workers 2:2" in (tmp_path / "here/ray.sh").read_text()
    refused = meshwright(*words, "--nodes", "2")
    assert refused.returncode == 2
    assert "drop --nodes, or give --ray-address" in refused.stderr
    refused = meshwright(*words, "--ray-address", "http://127.0.0.1:9")
    assert refused.returncode == 2
    assert "no Ray takes jobs at http://127.0.0.1:9" in refused.stderr


@heavy
def test_what_is_wrong_is_told_once_and_not_tried_again(
    meshwright: CommandLine, cluster: dict[str, str], tiny_run: list[str], tmp_path: Path
) -> None:
    # Inside of a cluster RAY_ADDRESS is set: the run is driven from here.
    wrong = ["data.path=nowhere", "run.dir=runs/wrong", "run.device=cpu", "elastic.max_restarts=1"]
    told = meshwright("launch", *tiny_run, *wrong, "--on", "ray", "--nproc", "2", **cluster)
    assert told.returncode == 2, told.stdout + told.stderr
    assert "meshwright launch: nowhere does not exist, so it is no packed corpus" in told.stderr
    assert "Traceback" not in told.stderr + told.stdout


@heavy
def test_a_job_is_stopped_and_goes_on_from_inside_of_the_cluster(
    meshwright: CommandLine, cluster: dict[str, str], tiny_run: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "runs/mine"
    settings = [*tiny_run, "train.steps=4000", "run.dir=runs/mine", "checkpoint.every=0", "run.device=cpu"]
    settings += ["parallel.strategy=dp=2"]

    def launch(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return meshwright("launch", *words, **{**cluster, "RAY_ADDRESS": cluster["JOBS"], **more})

    launched = launch(*settings, "--on", "ray", "--env", "OMP_NUM_THREADS=1")
    assert launched.returncode == 0, launched.stderr
    assert "mine is submitted: dp=2 on 2 ranks" in launched.stdout
    _until(lambda: _steps(run) >= 20, lambda: launch("logs", "runs/mine").stdout)
    assert "mine on ray: running (job mine-" in launch("status", "runs/mine").stdout
    assert "launched before on ray" in launch(*settings, "--on", "ray").stderr
    stopped = launch("stop", "runs/mine", "--wait", "60")
    assert "stopped (" in stopped.stdout, (stopped.stderr, launch("logs", "runs/mine").stdout)
    assert "stopping after this step and saving" in launch("logs", "runs/mine").stdout
    done = _steps(run)
    assert 20 <= done < 4000
    assert events(run)[-1]["event"] == "stopped"
    assert (run / f"checkpoints/step-{done:06d}/manifest.json").exists()
    # As a RayJob of KubeRay does it: the file that was submitted, with its plan beside it.
    file = str(tmp_path / "runs/mine.launch/run.toml")
    ended = launch(file, f"train.steps={done + 5}", "--on", "ray", RAY_ADDRESS=cluster["RAY_ADDRESS"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["step"] for row in metrics(run)] == list(range(1, done + 6))
