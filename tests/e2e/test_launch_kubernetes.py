"""The pods that are written for Kubernetes train: their commands are run as a kubelet would, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import CommandLine
from tests.ports import free_ports

pytestmark = pytest.mark.slow


class Kubelet:
    """Runs containers as processes: mounts become folders, names of pods the loopback address."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder = folder
        self.work, self.config = folder / "work", folder / "config"
        for place in (self.work, self.config):
            place.mkdir()
        (self.work / "data").symlink_to(corpus)
        self.endpoint = f"127.0.0.1:{free_ports(1)[0]}"

    def mount(self, config_map: dict[str, Any]) -> None:
        """The run file and the plan."""
        for name, text in config_map["data"].items():
            (self.config / name).write_text(text)

    def start(self, container: dict[str, Any], **injected: str) -> subprocess.Popen[str]:
        """One container, with the variables that a controller adds."""
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        environment = {**os.environ, **given, **injected}
        assert container["workingDir"] == "/training"
        words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in container["command"]]
        words = [word.replace("/meshwright/", f"{self.config}/") for word in words]
        words[words.index("--rendezvous") + 1] = self.endpoint
        assert words[0] == "python"
        return subprocess.Popen(
            [sys.executable, *words[1:]],
            cwd=self.work,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def kubelet(tmp_path: Path, corpus: Path) -> Kubelet:
    return Kubelet(tmp_path, corpus)


def written(meshwright: CommandLine, tiny_run: list[str], folder: Path, *words: object) -> dict[str, dict[str, Any]]:
    """The objects, by file, of a run on two machines."""
    settings = [*tiny_run, "data.path=data", "run.dir=runs/mine", "parallel.strategy=zero=1"]
    where = ("--on", "kubernetes", "--image", "team/meshwright:1", "--nodes", "2", "--volume", "w=pvc:claim:/training")
    done = meshwright("launch", *settings, *where, *words, "--dry-run", folder)
    assert done.returncode == 0, done.stderr
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}


def metrics(kubelet: Kubelet) -> list[dict[str, Any]]:
    file = kubelet.work / "runs/mine/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_pods_of_a_job_meet_and_train_to_the_end(
    meshwright: CommandLine, tiny_run: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    found = written(meshwright, tiny_run, tmp_path / "files", "--kind", "job")
    kubelet.mount(found["01-configmap.yaml"])
    container = found["04-job.yaml"]["spec"]["template"]["spec"]["containers"][0]
    pods = [kubelet.start(container, JOB_COMPLETION_INDEX=str(index)) for index in range(2)]
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    steps = [row["step"] for row in metrics(kubelet) if "loss" in row]
    assert steps == list(range(1, 7))


def test_stopped_pods_of_a_pytorch_job_end_with_a_code_that_starts_them_again_and_go_on(
    meshwright: CommandLine, tiny_run: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    found = written(meshwright, [*tiny_run, "train.steps=2000"], tmp_path / "files", "--kind", "pytorchjob")
    kubelet.mount(found["01-configmap.yaml"])
    replicas = found["02-pytorchjob.yaml"]["spec"]["pytorchReplicaSpecs"]

    def start() -> list[subprocess.Popen[str]]:
        # As the operator sets them for torchrun; `meshwright train` would take itself for one rank of such a job.
        told = {"MASTER_ADDR": "mine-master-0", "MASTER_PORT": "29400", "WORLD_SIZE": "2", "PET_NNODES": "2"}
        return [
            kubelet.start(one["template"]["spec"]["containers"][0], RANK=str(rank), PET_NODE_RANK=str(rank), **told)
            for rank, one in enumerate(replicas.values())
        ]

    pods = start()
    deadline = time.monotonic() + 180
    while not metrics(kubelet) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
    said = [pod.communicate(timeout=90)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [138, 138], said
    assert metrics(kubelet), said
    saved = metrics(kubelet)[-1]["step"]
    assert 0 < saved < 2000
    file = kubelet.config / "run.toml"
    file.write_text(file.read_text().replace("steps = 2000", f"steps = {saved + 2}"))
    pods = start()
    said = [pod.communicate(timeout=90)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert [row["step"] for row in metrics(kubelet) if "loss" in row] == list(range(1, saved + 3))


def test_a_hopeless_pod_ends_with_a_code_that_fails_the_job(
    meshwright: CommandLine, tiny_run: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    found = written(meshwright, tiny_run, tmp_path / "files", "--kind", "pytorchjob")
    text = found["01-configmap.yaml"]["data"]["run.toml"].replace('path = "data"', 'path = "nowhere"')
    kubelet.mount({"data": {"run.toml": text}})
    replicas = found["02-pytorchjob.yaml"]["spec"]["pytorchReplicaSpecs"]
    pods = [
        kubelet.start(one["template"]["spec"]["containers"][0], RANK=str(rank), WORLD_SIZE="2")
        for rank, one in enumerate(replicas.values())
    ]
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    assert {pod.returncode for pod in pods} == {2}, said
