"""Metrics on their way out: a real Prometheus server that scrapes a training, tokens, services that stop answering."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.tensorboard import TAGS
from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def until(found: Callable[[], Any], process: subprocess.Popen[Any], seconds: float = 60) -> Any:
    """What is found, once it is; the process must not end before."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)
    return answer


@contextmanager
def training(tmp_path: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training that goes on until the context ends; its words are in tmp_path/said.txt."""
    command = [sys.executable, "-m", "meshwright", "train", *options, "train.steps=1000000"]
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=said, stderr=said, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def run_id(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["run"])


def served(run: Path, process: subprocess.Popen[Any]) -> str:
    """The URL that the run says it serves metrics at."""
    (event,) = until(lambda: events(run, "prometheus"), process)
    return str(event["url"])


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus_server(tmp_path: Path, target: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Prometheus server that scrapes the target every second."""
    binary = shutil.which("prometheus", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if binary is None:
        pytest.skip("no prometheus here; `make system` brings it")
    scrape = {"job_name": "training", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML.
    port = free_port()
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'series'}"]
    with (tmp_path / "prometheus.txt").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield server, port
    finally:
        server.kill()
        server.wait()


def test_a_prometheus_server_scrapes_a_training(tiny_run: list[str], tmp_path: Path) -> None:
    options = [*tiny_run, "run.dir=a", "observe.prometheus=:0", "--nproc", "2"]
    with training(tmp_path, *options) as process:
        url = served(tmp_path / "a", process)
        assert f"watch  {url} for Prometheus" in (tmp_path / "said.txt").read_text()
        with prometheus_server(tmp_path, urllib.parse.urlsplit(url).netloc) as (server, port):

            def ask(query: str) -> list[dict[str, Any]]:
                text = urllib.parse.quote(query)
                try:
                    answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?query={text}"))
                except OSError:  # It is not up yet.
                    return []
                return list(answer["data"]["result"])

            found = until(lambda: ask("rate(meshwright_tokens_total[30s]) > 0"), server)
            (series,) = found
            assert {name: series["metric"][name] for name in ("rank", "run")} == {"rank": "0", "run": "a"}
            assert series["metric"]["host"] == socket.gethostname()
            of_steps = ("step_seconds", "loss", "loss_max", "spike_score", "learning_rate", "steps_skipped_total")
            of_speed = ("tokens_per_second", "tokens_per_second_per_device", "model_teraflops_per_second_per_device")
            for name in (*of_steps, *of_speed):
                assert len(ask(f"meshwright_{name}")) == 1, name
            # What ranks have of their own is there of each rank of the machine, and of the whole run only once.
            for rank in ("0", "1"):
                own = f"rank='{rank}',run='a',host='{socket.gethostname()}'"
                (memory,) = until(partial(ask, f"meshwright_memory_bytes{{kind='rss',{own}}}"), server)
                assert float(memory["value"][1]) > 1e7
                found = until(partial(ask, f"meshwright_phase_seconds_total{{{own}}} > 0"), server)
                phases = {series["metric"]["phase"] for series in found}
                assert {"data", "forward", "backward", "optimizer", "hooks"} <= phases
                # All of it is this rank's time, so together no more than there was.
                total = float(ask(f"sum(meshwright_phase_seconds_total{{{own}}})")[0]["value"][1])
                assert 0 < total < time.time() - events(tmp_path / "a", "started")[0]["time"] + 10
                assert until(
                    partial(ask, f"rate(meshwright_phase_seconds_total{{phase='forward',{own}}}[30s]) > 0"), server
                )
            assert {series["metric"]["rank"] for series in ask("meshwright_memory_bytes")} == {"0", "1"}
        boards = [
            path
            for root in ("/dev/shm", tempfile.gettempdir())
            for path in Path(root).glob(f"meshwright-*-{run_id(tmp_path / 'a')}-*")
        ]
        assert [sorted(file.name for file in path.iterdir()) for path in boards] == [["1"]]
    assert not any(path.exists() for path in boards)


def test_metrics_that_others_can_reach_need_a_token(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*tiny_run, "run.dir=a", "observe.prometheus=0.0.0.0:0"]
    refused = meshwright("train", *options)
    assert refused.returncode == 2
    assert "set observe.prometheus_token_file" in refused.stderr
    token_file = tmp_path / "token"
    options.append(f"observe.prometheus_token_file={token_file}")
    missing = meshwright("train", *options)
    assert missing.returncode == 2
    assert "observe.prometheus_token_file" in missing.stderr
    assert "cannot be read" in missing.stderr
    token_file.touch(0o600)
    token_file.write_text("a-token-of-some-length\n")
    with training(tmp_path, *options) as process:
        url = served(tmp_path / "a", process).replace("0.0.0.0", "127.0.0.1")
        assert "meshwright_run_info" in get(url, Authorization="Bearer a-token-of-some-length")
        for headers in ({}, {"Authorization": "Bearer a-token-of-some-lengt"}):
            with pytest.raises(urllib.error.HTTPError) as answer:
                get(url, **headers)
            assert answer.value.code == 401
            answer.value.close()


@contextmanager
def tracking_server(tmp_path: Path, *stop_at: str) -> Iterator[tuple[str, Path]]:
    """A stand-in for an MLflow server, its URL and the file with what it is told."""
    told = tmp_path / "told.jsonl"
    command = [sys.executable, "-m", "tests.e2e.tracking_server", str(told), *stop_at]
    server = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}", told
    finally:
        server.kill()
        server.communicate()


def test_mlflow_gets_the_metrics_and_a_resumed_run_goes_on_there(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*tiny_run, "run.dir=a", "observe.mlflow=true"]
    refused = meshwright("train", *options)
    assert refused.returncode == 2
    assert "set MLFLOW_TRACKING_URI" in refused.stderr
    with tracking_server(tmp_path) as (url, file):
        variables = {"MLFLOW_TRACKING_URI": url.replace("://", "://me:pass%2Fword@")}
        for steps in (6, 8):
            result = meshwright("train", *options, f"train.steps={steps}", **variables)
            assert result.returncode == 0, result.stderr
        told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["path"] for line in told].count("runs/create") == 1
    batches = [line["content"] for line in told if line["path"] == "runs/log-batch"]
    metrics = [metric for batch in batches for metric in batch.get("metrics", [])]
    assert [metric["step"] for metric in metrics if metric["key"] == "train/loss"] == [1, 2, 3, 4, 5, 6, 7, 8]
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    exported = {name for row in rows for name in row} - NOT_EXPORTED
    added = {"loss_max", "spike_score", "tflops_per_device", "tokens_per_s_per_device", "peak_memory_gib"}
    assert added <= exported
    for name in exported:
        sent = {metric["step"]: metric["value"] for metric in metrics if metric["key"] == TAGS[name]}
        assert sent == {row["step"]: row[name] for row in rows if name in row}, name
    assert {batch["run_id"] for batch in batches} == {"run-0"}
    settings = {entry["key"]: entry["value"] for batch in batches for entry in batch.get("params", [])}
    assert settings["train.steps"] == "6"
    ends = [line["content"].get("status") for line in told if line["path"] == "runs/update"]
    assert ends == ["FINISHED", "RUNNING", "FINISHED"]
    assert {line["authorization"] for line in told} == {"Basic bWU6cGFzcy93b3Jk"}


NOT_EXPORTED = {"step", "time", "tokens", "staged_step", "durable_step"}
"""What says when and where a step was, not how it went."""

TIMED_RUN = """
import json, sys, time
from meshwright.config import load_config
from meshwright.trainer import Trainer
from meshwright.training.hooks import Hook

class Clock(Hook):
    def __init__(self):
        self.ends = []
    def after_step(self, trainer, metrics):
        self.ends.append(time.perf_counter())

trainer = Trainer(load_config(None, sys.argv[2:]))
trainer.hooks.append(clock := Clock())
trainer.train()
with open(sys.argv[1], "w") as file:
    json.dump([after - before for before, after in zip(clock.ends, clock.ends[1:])], file)
"""
"""A training in one process, which ends as any Python program; writes how long its steps took, hooks included."""


@pytest.mark.alone
def test_services_that_stop_answering_slow_no_step_and_are_left_behind(tiny_run: list[str], tmp_path: Path) -> None:
    settings = [setting for setting in tiny_run if not setting.startswith("train.steps")]
    settings += ["train.steps=500", "observe.tensorboard=false", "checkpoint.every=0"]

    def start(name: str, *more: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TIMED_RUN, f"{name}.json", *settings, f"run.dir={name}", *more]
        environment = {**os.environ, **variables, "HOME": str(tmp_path)}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    plain = start("plain")
    plain.communicate(timeout=120)
    exporters = ["observe.wandb=true", "observe.mlflow=true", "observe.prometheus=:0"]
    with (
        tracking_server(tmp_path, "runs/log-batch") as (tracking, file),
        # The kernel takes connections for it, and nobody ever reads them.
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        base = f"http://127.0.0.1:{silent.getsockname()[1]}"
        services = {"MLFLOW_TRACKING_URI": tracking, "WANDB_BASE_URL": base, "WANDB_API_KEY": "0" * 40}
        process = start("watched", *exporters, **services)
        address = urllib.parse.urlsplit(served(tmp_path / "watched", process))
        scrapers = [socket.create_connection((address.hostname, address.port)) for _ in range(20)]
        for scraper in scrapers[:4]:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        _, errors = process.communicate(timeout=120)
        ended = time.time()
        for scraper in scrapers:
            scraper.close()
        assert process.returncode == 0, errors
        told = [json.loads(line)["path"] for line in file.read_text().splitlines()]
    assert told.count("runs/log-batch") == 2, "the server has stopped itself"
    for name in ("Weights & Biases", "MLflow"):
        assert f"{name} has not finished in 10 s and is left behind" in errors
    assert len(events(tmp_path / "watched", "exporter")) == 2
    # Both have had the same ten seconds.
    assert ended - events(tmp_path / "watched", "finished")[0]["time"] < 18
    off, on = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "watched"))
    assert statistics.median(on) < 1.5 * statistics.median(off) + 0.002
    # One that waits for a service would wait for seconds.
    assert max(on) < max(off) + 1
