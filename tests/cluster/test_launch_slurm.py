"""`meshwright launch --on slurm` on a real Slurm: two of its nodes, a rank on each."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.e2e.trainings import events, metrics
from tests.ports import free_ports
from tests.slurm import slurm

STEPS = 300
RUN = "runs/my run"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def launch(meshwright: CommandLine, cluster: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *words: meshwright("launch", *words, **cluster)


@pytest.fixture
def words(tiny_run: list[str]) -> list[str]:
    once = ["train.global_batch=4", f"train.steps={STEPS}", "checkpoint.every=0", f"run.dir={RUN}"]
    return [*tiny_run, *once, "--on", "slurm", "--nodes", "2", "--env", "OMP_NUM_THREADS=1"]


def _until(there: Callable[[], bool], told: Callable[[], object]) -> None:
    deadline = time.monotonic() + 150
    while not there():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


def test_a_job_is_preempted_requeued_stopped_and_goes_on(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str], cluster: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / RUN

    def steps() -> int:
        return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0

    launched = launch(*words)
    assert launched.returncode == 0, launched.stderr
    _until(lambda: steps() >= 5, lambda: launch("logs", RUN).stdout)
    shown = launch("status", RUN).stdout
    assert "on slurm: running (job" in shown
    assert "first,second" in shown
    job = json.loads((tmp_path / f"{RUN}.launch/launch.json").read_text())["job"]
    # What Slurm does some time before the limit, and at a preemption.
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=cluster, check=True, capture_output=True)
    _until(lambda: "on slurm: waiting" in launch("status", RUN).stdout, lambda: launch("status", RUN))
    before = steps()
    assert 5 <= before < STEPS
    _until(lambda: steps() > before, lambda: launch("logs", RUN).stdout)
    stopped = launch("stop", RUN, "--wait", "60")
    assert "stopped (" in stopped.stdout, (stopped.stderr, launch("logs", RUN).stdout)
    assert before < steps() < STEPS
    assert launch(*words).returncode == 0
    followed = launch("logs", RUN, "--follow").stdout
    assert "-node0: 0: step" in followed or "-node1: 1: step" in followed  # Either may be the first of the run.
    assert "on slurm: finished" in launch("status", RUN).stdout
    # Each rank has its lines for itself, whichever machine it was on; one of them tells the steps.
    own = [launch("logs", RUN, "--rank", str(rank)) for rank in range(3)]
    assert [shown.returncode for shown in own] == [0, 0, 2], own[2].stderr
    assert f"step {STEPS}/{STEPS}" in own[0].stdout
    assert "step " not in own[1].stdout
    assert set(own[0].stdout.splitlines()) <= {
        line.partition(": ")[2].partition(": ")[2] for line in followed.splitlines()
    }
    # A job that has ended is not asked to.
    assert launch("stop", RUN).returncode == 2
    job = json.loads((tmp_path / f"{RUN}.launch/launch.json").read_text())["job"]
    assert not (tmp_path / f"{RUN}.launch/stop-{job}").exists()
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))
    assert [event["event"] for event in events(run)].count("resumed") == 2


def test_what_slurm_would_refuse_is_told_in_its_words_and_nothing_is_left(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str], tmp_path: Path
) -> None:
    refused = launch(*words, "--partition", "nowhere")
    assert refused.returncode == 2
    assert "invalid partition specified: nowhere" in refused.stderr
    many = launch(*words, "train.global_batch=9", "--nodes", "9")
    assert many.returncode == 2
    assert "Slurm refuses: " in many.stderr
    assert not (tmp_path / "runs").exists()


def test_a_controller_that_is_down_is_told_apart_from_a_refusal(
    meshwright: CommandLine,
    cluster: dict[str, str],
    words: list[str],
    tmp_path: Path,
) -> None:
    settings = Path(cluster["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(re.sub("SlurmctldPort=.*", f"SlurmctldPort={free_ports(1)[0]}", settings))
    away = meshwright("launch", *words, **cluster | {"SLURM_CONF": str(tmp_path / "slurm.conf")})
    assert away.returncode == 2
    assert "Slurm does not answer: " in away.stderr
    assert "refuses" not in away.stderr


def test_a_job_that_waits_is_taken_out_of_the_queue(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str]
) -> None:
    assert launch(*words, "--sbatch=--begin=now+1hour").returncode == 0
    waits = launch("status", RUN).stdout
    assert "on slurm: waiting" in waits
    assert "BeginTime" in waits
    assert "out of the queue" in launch("stop", RUN).stdout
    assert "on slurm: stopped" in launch("status", RUN).stdout


def test_the_script_for_review_is_what_bash_takes(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "setup.sh").write_text("module() { :; }\nmodule load cuda\n")
    more = ["--nodes", "2:4", "--time", "24:00:00", "--account", "us", "--setup", "setup.sh", "--dry-run", "review"]
    assert launch(*words, *more).returncode == 0
    script = (tmp_path / "review/job.sh").read_text()
    subprocess.run(["bash", "-n", tmp_path / "review/job.sh"], check=True)
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    for line in ("--nodes=2-4", "--no-kill", "--requeue", "--signal=B:USR1@120", "--time=24:00:00", "--account=us"):
        assert f"#SBATCH {line}" in asked
    assert "module load cuda" in script
    assert not (tmp_path / "runs").exists()


def test_what_was_written_for_review_trains_when_it_is_submitted_as_it_lies(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str], cluster: dict[str, str], tmp_path: Path
) -> None:
    review = tmp_path / "for review"
    # Of this shell's variables the job has none; its own ones srun hands on all the same.
    assert launch(*words, "train.steps=6", "--sbatch=--export=NONE", "--dry-run", "for review").returncode == 0
    subprocess.run(["bash", "-n", review / "job.sh"], check=True)
    # From anywhere, and until it has ended.
    sent = subprocess.run(
        ["sbatch", "--wait", review / "job.sh"],
        env=os.environ | cluster, cwd="/", capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    logs = {file.name: file.read_text() for file in review.glob("*.log")}
    assert sent.returncode == 0, (sent.stderr, logs)
    assert len(metrics(tmp_path / RUN)) == 6
    job = sent.stdout.split()[-1]
    assert {f"slurm-{job}.log", f"{job}-node0.log", f"{job}-node1.log", f"{job}-rank0.log"} <= set(logs)
    assert (review / f"ended-{job}").read_text() == "0\n"
    assert not (tmp_path / f"{RUN}.launch").exists()


def test_tasks_of_srun_are_ranks(cluster: dict[str, str], tiny_run: list[str], tmp_path: Path) -> None:
    command = ["srun", "-n", "2", "-N", "2", sys.executable, "-m", "meshwright", "train", *tiny_run, "run.dir=run"]
    ended = subprocess.run(
        command, env=os.environ | cluster, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 of 2, as srun started it; they meet at 127.0.0.1" in ended.stdout
    assert len(metrics(tmp_path / "run")) == 6


def test_machines_by_pet_meet_at_the_first(tiny_run: list[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "1"}
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", "train", *tiny_run, "run.dir=run"],
            env=os.environ | place | {"PET_NODE_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [machine.communicate(timeout=120)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert "machine 1 of 2 by PET_*" in told[1]
    assert len(metrics(tmp_path / "run")) == 6
