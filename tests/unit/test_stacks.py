"""Stacks of real processes, taken from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.elastic.mismatch import explain_abort, explain_disagreement, fatal_stack
from meshwright.elastic.processes import catches, process_state
from meshwright.elastic.rank_side import STACK_SIGNAL
from meshwright.elastic.stacks import PY_SPY, take_stacks

PROGRAM = """
import re, sys, time
from pathlib import Path
from meshwright.elastic.rank_side import answer_watchers

def sleeps():
    time.sleep(60)

def holds_the_gil():
    re.match(r"(a?){40}a{40}", "a" * 40)

answer_watchers(Path(sys.argv[1]), 3)
print("ready", flush=True)
globals()[sys.argv[2]]()
"""


@pytest.fixture(params=["sleeps", "holds_the_gil"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A process that answers as a rank does, and the function that it is in."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    yield process.pid, request.param
    process.kill()
    process.wait()
    process.stdout.close()


def test_py_spy_sees_the_line_and_who_holds_the_gil_also_of_a_stopped_process(
    rank: tuple[int, str], tmp_path: Path
) -> None:
    pid, function = rank
    for _ in range(2):
        stacks = take_stacks(pid, tmp_path, 3)
        assert stacks.source == "py-spy", stacks.problem
        assert function in [frame.function for frame in stacks.main]
        assert stacks.holds_gil is (function == "holds_the_gil")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
    assert process_state(pid).state == "T", "looking must not let it go on"


def test_signal_gives_the_stacks_where_there_is_no_py_spy(
    rank: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PY_SPY, "")
    pid, function = rank
    assert catches(pid, STACK_SIGNAL)
    for _ in range(2):
        stacks = take_stacks(pid, tmp_path, 3)
        assert stacks.source == "faulthandler", stacks.problem
        assert function in [frame.function for frame in stacks.main]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert "stopped and does not answer" in take_stacks(pid, tmp_path, 3).problem


def test_process_that_does_not_answer_is_not_killed_by_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PY_SPY, "")
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert "does not answer the signal" in take_stacks(process.pid, tmp_path, 0).problem
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_state_of_a_process_that_has_ended_is_known(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while process_state(process.pid).state != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_state(process.pid).ended
    process.communicate()
    assert process_state(process.pid).state == "gone"


def test_disagreement_of_checked_ranks_is_put_in_a_sentence() -> None:
    options = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default))"
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        f"CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[2, 3], TensorDtypes=Double, {options})"
        ", but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=BARRIER)."
    )
    found = explain_disagreement(text)
    assert found is not None
    assert "rank 0 called all_reduce of [2, 3] double, rank 1 called barrier" in found
    assert explain_disagreement("RuntimeError: Connection closed by peer") is None


def test_abort_outside_a_collective_is_not_taken_for_a_disagreement(tmp_path: Path) -> None:
    program = f"import faulthandler, os\nfaulthandler.enable(open({str(tmp_path / '1.fatal')!r}, 'w'))\nos.abort()"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGABRT
    assert "in <module>" in fatal_stack(tmp_path / "1.fatal")
    assert explain_abort(tmp_path, {1: signal.SIGABRT}) is None
    assert explain_abort(tmp_path, {1: signal.SIGKILL}) is None
    assert fatal_stack(tmp_path / "2.fatal") == ""
