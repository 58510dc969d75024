"""Machines of a training on several nodes: hosts of their own, and one more for the rendezvous.

`Machines` makes them and takes them away; `train` starts a machine's share of the run.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.chaos.runs import SETTINGS, Training, environment_of
from tests.hosts import Hosts


class Machines(Hosts):
    """Some machines, named a, b, c, ..., on one network; `store` is one more, for the rendezvous."""

    def __init__(self, count: int, folder: Path, settings: list[str]) -> None:
        super().__init__([*(chr(ord("a") + number) for number in range(count)), "store"], folder)
        self.settings, self.run_folder = settings, folder / "run"
        self.endpoint = ""
        self.run_id = "tested"

    def __enter__(self) -> Self:
        super().__enter__()
        self.serve()
        return self

    def serve(self, *options: str) -> subprocess.Popen[str]:
        """Start the rendezvous; gives its process."""
        address = f"{self.address('store')}:29400"
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
        return Training(self._popen(name, *words, fault=fault), self.run_folder)

    def kill(self, training: Training) -> None:
        """End everything of a machine at once, as a power cut does."""
        for process in [training.launcher, *training.launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        training.process.communicate()

    def _popen(self, name: str, *words: str, fault: str = "") -> subprocess.Popen[str]:
        return self.popen(name, "meshwright", *words, env=environment_of(fault, self.run_folder))


def until(condition: object, what: str, timeout: float = 60) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    assert callable(condition)
    while not condition():
        assert time.monotonic() - began < timeout, f"no {what} in {timeout:g} s"
        time.sleep(0.05)
    return time.monotonic() - began
