"""Machines of our own for tests of several nodes: network namespaces on a bridge, each with an address and a name.

`Machines` makes them and takes them away; `start` runs a command in one. A machine's link can be cut and put back.
Needs root and iproute2, as CI has; the namespaces talk to each other and to nobody else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.runs import SETTINGS, Training, environment_of


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machines:
    """Some machines, named a, b, c, ..., on one network; `store` is one more, for the rendezvous."""

    def __init__(self, count: int, folder: Path, settings: list[str]) -> None:
        self.tag = f"mw{os.getpid() % 10000}"
        self.names = [*(chr(ord("a") + number) for number in range(count)), "store"]
        self.folder, self.settings = folder, settings
        self.processes: list[subprocess.Popen[str]] = []
        self.endpoint = ""
        self.run_id = "tested"

    def __enter__(self) -> Machines:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None:
            pytest.skip("network namespaces need root, and ip and ss of iproute2")
        bridge = self._space("net")
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            space = self._space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{name}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        self.serve()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                for member in [psutil.Process(process.pid), *family]:
                    with suppress(psutil.NoSuchProcess):
                        member.kill()
            with suppress(ValueError):
                process.communicate()
        for name in [*self.names, "net"]:
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True)

    def serve(self, *options: str) -> subprocess.Popen[str]:
        """Start the rendezvous; gives its process."""
        address = f"10.77.0.{len(self.names)}:29400"
        process = self._popen("store", "rendezvous", "--listen", address, "--run-id", self.run_id, *options)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert address in line, line
        self.endpoint = address
        return process

    def train(self, name: str, *options: str, nodes: str, nproc: int = 1, fault: str = "") -> Training:
        """Start a machine's share of the run."""
        where = ["--rendezvous", self.endpoint, "--nodes", nodes, "--run-id", self.run_id, "--nproc", str(nproc)]
        words = ["train", *self.settings, *SETTINGS, "run.dir=run", *where, *options]
        return Training(self._popen(name, *words, fault=fault), self.folder / "run")

    def cut(self, name: str) -> None:
        """Pull a machine's cable."""
        ip("-n", self._space("net"), "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put it back."""
        ip("-n", self._space("net"), "link", "set", f"to-{name}", "up")

    def kill(self, training: Training) -> None:
        """End everything of a machine at once, as a power cut does."""
        for process in [training.launcher, *training.launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        training.process.communicate()

    def listeners(self, name: str) -> list[str]:
        """Addresses that anything on a machine listens on."""
        words = ["ip", "netns", "exec", self._space(name), "ss", "-Hltn"]
        shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        return [line.split()[3] for line in shown.splitlines()]

    def _space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def _popen(self, name: str, *words: str, fault: str = "") -> subprocess.Popen[str]:
        # A host name of its own: machines are told apart by it.
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self._space(name), *named, sys.executable, "-m", "meshwright", *words]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment_of(fault, self.folder / "run"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


def until(condition: object, what: str, timeout: float = 60) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    assert callable(condition)
    while not condition():
        assert time.monotonic() - began < timeout, f"no {what} in {timeout:g} s"
        time.sleep(0.05)
    return time.monotonic() - began
