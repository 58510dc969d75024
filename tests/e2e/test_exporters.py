"""Metrics on their way out: a real Prometheus server that scrapes a training, tokens, services that stop answering."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
            for name in ("step_seconds", "loss", "tokens_per_second", "learning_rate", "steps_skipped_total"):
                assert len(ask(f"meshwright_{name}")) == 1, name
            assert float(ask("meshwright_memory_bytes{kind='rss'}")[0]["value"][1]) > 1e7
            phases = {series["metric"]["phase"] for series in ask("meshwright_phase_seconds_total > 0")}
            assert {"data", "forward", "backward", "optimizer", "hooks"} <= phases
            # All of it is this rank's time, so together no more than there was.
            total = float(ask("sum(meshwright_phase_seconds_total)")[0]["value"][1])
            assert 0 < total < time.time() - events(tmp_path / "a", "started")[0]["time"] + 10


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
    token_file.write_text("a-token-of-some-length\n")
    with training(tmp_path, *options) as process:
        url = served(tmp_path / "a", process).replace("0.0.0.0", "127.0.0.1")
        assert "meshwright_run_info" in get(url, Authorization="Bearer a-token-of-some-length")
        for headers in ({}, {"Authorization": "Bearer a-token-of-some-lengt"}):
            with pytest.raises(urllib.error.HTTPError) as answer:
                get(url, **headers)
            assert answer.value.code == 401
            answer.value.close()
