"""A real Ray on this machine: a head node of three CPUs that listens on loopback alone and asks for a token."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.ports import free_ports

CPUS = 3


@contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Gives the variables with which its users find it: RAY_ADDRESS to join it, JOBS for its job API."""
    # Sockets are in there, whose names may not be long.
    folder = Path(tempfile.mkdtemp(prefix="mw-ray-", dir="/tmp"))
    gcs, dashboard, agent, client = free_ports(4)
    variables = {
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5" * 64,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
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
        # Nobody is to save anything any more.
        whole = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in whole:
            process.kill()
        head.wait(30)
        psutil.wait_procs(whole, timeout=20)
        shutil.rmtree(folder, ignore_errors=True)


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
