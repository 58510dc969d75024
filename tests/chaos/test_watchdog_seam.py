"""What a watchdog says of ranks that hang ends them and starts them again; what it warns of is passed on."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from meshwright.elastic.budget import Budget
from meshwright.elastic.membership import Alone
from meshwright.elastic.placement import Placement
from meshwright.elastic.ranks import Work
from meshwright.elastic.supervisor import Supervisor
from meshwright.errors import ExitCode
from meshwright.launch.local import stay_on_loopback
from meshwright.parallel.world import World
from meshwright.training.run_folder import RunFolder
from tests.chaos.runs import events

WATCHDOG = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
while not (folder / "ranks.json").exists():
    time.sleep(0.02)
print(json.dumps({"kind": "warning", "ranks": [0], "text": "rank 0 is slow"}), flush=True)
while True:
    ranks = json.loads((folder / "ranks.json").read_text())
    if ranks["generation"] == 0 and (folder / "1.pulse").exists():
        assert sorted(ranks["ranks"]) == ["0", "1"] and ranks["run_dir"]
        time.sleep(0.5)
        print(json.dumps({"kind": "hang", "ranks": [1], "report": "hang.txt", "text": "rank 1 hangs in forward"}))
        sys.stdout.flush()
        time.sleep(60)
    time.sleep(0.02)
"""


def work_that_stops_once(done: Path, world: World) -> None:
    world.pulse.step = 3
    world.pulse.enter("forward")
    if world.pulse.generation == 0 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if world.pulse.generation == 0:
        time.sleep(60)
    done.write_text("done")


def work_of(done: Path, placement: Placement) -> Work:
    return partial(work_that_stops_once, done)  # type: ignore[return-value]


def test_hang_is_ended_and_restarted_with_the_watchdogs_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "watchdog.py").write_text(WATCHDOG)
    stay_on_loopback()
    supervisor = Supervisor(
        partial(work_of, tmp_path / "done"),
        Alone(2, Budget(3)),
        device="cpu",
        timeout_s=60,
        folder=RunFolder(tmp_path / "run"),
        watchdog=[sys.executable, str(tmp_path / "watchdog.py")],
    )
    began = time.monotonic()
    assert supervisor.run().code == ExitCode.DONE
    assert time.monotonic() - began < 30
    assert (tmp_path / "done").exists()
    (failed,) = events(tmp_path / "run", "failed")
    assert (failed["rank"], failed["cause"], failed["step"], failed["phase"]) == (1, "hangs", 3, "forward")
    errors = capfd.readouterr().err
    assert "rank 0 is slow" in errors
    assert "rank 1 hangs in forward\nthe whole report is in hang.txt" in errors
