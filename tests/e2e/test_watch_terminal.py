"""`meshwright watch` on a terminal and elsewhere: runs that are over, go on or have failed."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from tests.chaos.conftest import SETTINGS
from tests.chaos.runs import start
from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings(corpus: Path) -> list[str]:
    return [*SETTINGS, f"data.path={corpus}"]


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = start(tmp_path_factory.mktemp("finished"), settings)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    return training.folder


def test_finished_run_is_shown_once_and_told_in_lines(finished: Path, meshwright: CommandLine) -> None:
    shown = meshwright("watch", finished, "--once", COLUMNS="100")
    assert shown.returncode == 0, shown.stderr
    assert "finished" in shown.stdout.splitlines()[0]
    assert "step 20/20" in shown.stdout
    assert "\x1b" not in shown.stdout, "colours where there is no terminal"
    assert "goodput" in shown.stdout
    assert "latest events" in shown.stdout
    told = meshwright("watch", finished)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "finished"
    assert "step 20/20  loss" in told.stdout


def test_running_run_is_shown_while_it_runs(settings: list[str], tmp_path: Path, meshwright: CommandLine) -> None:
    training = start(tmp_path, settings, "train.steps=100000", fault="phase=data,kind=sleep:0.1,times=100000")
    try:
        training.wait_for_step(3)
        shown = meshwright("watch", training.folder, "--once", COLUMNS="100")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.splitlines()[0].endswith("running")
        assert "ETA" in shown.stdout
        told = subprocess.Popen(
            [sys.executable, "-m", "meshwright", "watch", training.folder], stdout=subprocess.PIPE, text=True
        )
        assert told.stdout is not None
        assert "started at step 0" in told.stdout.readline()
        training.process.send_signal(signal.SIGTERM)
        rest, _ = told.communicate(timeout=60)
        assert rest.splitlines()[-1].startswith("stopped")
        assert training.wait().code == ExitCode.PREEMPTED
    finally:
        training.end()


def test_failed_run_is_shown_with_who_failed(settings: list[str], tmp_path: Path, meshwright: CommandLine) -> None:
    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    training = start(tmp_path, settings, "elastic.max_restarts=0", fault=fault)
    ended = training.wait()
    assert ended.code != ExitCode.DONE
    assert "loss " in ended.out
    assert "the report is in run/report.html" in ended.out
    assert "ended by SIGKILL" in (training.folder / "report.html").read_text()
    shown = meshwright("watch", training.folder, "--once", COLUMNS="120")
    assert "failed" in shown.stdout.splitlines()[0]
    assert "ended by SIGKILL" in shown.stdout


def test_mistakes_are_told_in_a_sentence(finished: Path, meshwright: CommandLine) -> None:
    for arguments, said in (
        ((finished / "nothing",), "is not a folder"),
        ((finished.parent,), "holds no run"),
        ((finished, finished), "say --web"),
        ((finished, "--steps", "3:"), "--trace"),
        ((finished, "--trace", "t.json", "--steps", "x"), "--steps x: give A:B"),
        ((finished, "--trace", "t.json", "--steps", "5:4"), "no step from 5 to 4"),
        ((finished, "--trace", "t.json", "--steps", "9000:"), "has a timeline"),
        ((finished, "--trace", finished / "no" / "t.json"), "cannot be written"),
    ):
        refused = meshwright("watch", *arguments)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("ending", ["q", "\x03", "SIGTERM"])
def test_terminal_is_given_back_as_it_was(ending: str, finished: Path) -> None:
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (24, 80))
    before = termios.tcgetattr(side)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "watch", finished],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=_own_terminal,
    )
    try:
        shown = _read_until(main, b"latest events")
        assert b"\x1b[?1049h" in shown, "not on the alternate screen"
        assert b"\x1b[?25l" in shown
        if ending == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(main, ending.encode())
        rest = _read_until(main, b"\x1b[?1049l")
        assert process.wait(timeout=10) == (128 + signal.SIGTERM if ending == "SIGTERM" else 0)
        assert b"\x1b[?25h" in rest, "the cursor stays hidden"
        assert termios.tcgetattr(side) == before
        assert b"Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(side)


def _own_terminal() -> None:
    """Make the terminal that of this process, so that Ctrl-C reaches it."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(descriptor: int, wanted: bytes, timeout: float = 20.0) -> bytes:
    found, deadline = b"", time.monotonic() + timeout
    while wanted not in found:
        assert time.monotonic() < deadline, found[-2000:]
        if select.select([descriptor], [], [], 0.1)[0]:
            found += os.read(descriptor, 65536)
    return found
