"""Nothing listens on the network during a local training, and only on the chosen interface with several machines."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from meshwright.errors import ExitCode
from tests.chaos.machines import Machines, until
from tests.chaos.runs import Training, last_step, start


def listening(training: Training) -> list[str]:
    """Addresses on which the processes of a training listen, as `ss` shows them."""
    family = [training.launcher, *training.launcher.children(recursive=True)]
    shown = subprocess.run(["ss", "-Hltnp"], check=True, capture_output=True, text=True).stdout
    return [
        line.split()[3].rsplit(":", 1)[0]
        for line in shown.splitlines()
        if any(f"pid={process.pid}," in line for process in family)
    ]


def test_local_training_listens_on_loopback_only(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, "train.steps=100000")
    training.wait_for_step(2)
    found = listening(training)
    training.launcher.send_signal(signal.SIGTERM)
    assert training.wait().code == ExitCode.PREEMPTED
    assert found, "gloo's own listeners should be seen"
    assert set(found) <= {"127.0.0.1", "[::1]"}


def test_several_machines_listen_on_the_network_that_they_were_given(settings: list[str], tmp_path: Path) -> None:
    with Machines(2, tmp_path, settings) as machines:
        trainings = [machines.train(name, "train.steps=100000", nodes="2") for name in "ab"]
        until(lambda: last_step(trainings[0].folder) >= 2, "step 2")
        for number, name in enumerate("ab"):
            found = {address.rsplit(":", 1)[0] for address in machines.listeners(name)}
            assert found == {f"10.77.0.{number + 1}"}
        assert machines.listeners("store") == [machines.endpoint]
        for training in trainings:
            training.launcher.send_signal(signal.SIGTERM)
        for training in trainings:
            assert training.wait().code == ExitCode.PREEMPTED
