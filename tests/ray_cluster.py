"""Real Rays on this machine, which listen on loopback alone and ask for a token."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_ports

CPUS = 3


@contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Three CPUs. Gives the variables with which its users find it: RAY_ADDRESS to join it, JOBS for its job API."""
    # Sockets are in there, whose names may not be long.
    folder = Path(tempfile.mkdtemp(prefix="mw-ray-", dir="/tmp"))
    gcs, dashboard, agent, client = free_ports(4)
    variables = _variables(folder)
    options = [
        "--num-cpus",
        str(CPUS),
        "--port",
        str(gcs),
        "--dashboard-port",
        str(dashboard),
        "--temp-dir",
        f"{folder}/s",
    ]
    options += ["--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log, cwd=folder)
    try:
        _until_it_answers(f"http://127.0.0.1:{dashboard}", head, folder / "log")
        yield {**variables, "RAY_ADDRESS": f"127.0.0.1:{gcs}", "JOBS": f"http://127.0.0.1:{dashboard}"}
    finally:
        _kill(head)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def growing_ray() -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """A Ray of one CPU: gives its variables, and what adds a node of another CPU."""
    folder = Path(tempfile.mkdtemp(prefix="mw-ray-", dir="/tmp"))
    variables = {**_variables(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "tests.cluster.ray_nodes"]
    nodes = subprocess.Popen(
        command, env={**os.environ, **variables}, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    given, told = nodes.stdin, nodes.stdout

    def grow() -> None:
        given.write("\n")
        given.flush()
        assert told.readline() == "two\n"

    try:
        yield {**variables, "RAY_ADDRESS": told.readline().strip()}, grow
    finally:
        _kill(nodes)
        shutil.rmtree(folder, ignore_errors=True)


def _variables(folder: Path) -> dict[str, str]:
    """What keeps Ray in a folder and on loopback."""
    return {
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5" * 64,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


def _kill(started: subprocess.Popen[Any]) -> None:
    """With all that it has started; nobody is to save anything any more."""
    whole = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    for process in whole:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    started.wait(30)
    psutil.wait_procs(whole, timeout=20)


def _until_it_answers(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/version", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # It wants the token.
        except OSError:
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
