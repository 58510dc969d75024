"""Tests side by side: every one runs once, none is passed over, and a failure anywhere is one of the whole run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PROBE = """
import json, os, signal, time, pytest

@pytest.fixture(autouse=True)
def noted(request):
    began = time.monotonic()
    yield
    with open("log", "a") as file:
        file.write(json.dumps([request.node.name, os.getpid(), began, time.monotonic()]) + "\\n")

@pytest.mark.parametrize("number", range(30))
def test_short(number):
    time.sleep(0.02)
    print("said by", number)
    PLANTED

@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    time.sleep(0.05)
"""


def start(folder: Path, planted: str = "") -> subprocess.Popen[str]:
    (folder / "test_probe.py").write_text(PROBE.replace("PLANTED", planted))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def ran(folder: Path) -> list[tuple[str, int, float, float]]:
    return [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def test_every_test_runs_once_and_those_alone_when_the_others_have_ended(tmp_path: Path) -> None:
    process = start(tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "32 passed" in said
    shorts = [line for line in ran(tmp_path) if "alone" not in line[0]]
    alone = [line for line in ran(tmp_path) if "alone" in line[0]]
    assert sorted(name for name, *_ in shorts) == sorted(f"test_short[{number}]" for number in range(30))
    assert len({pid for _, pid, _, _ in shorts}) == 2
    assert any(a[2] < b[2] < a[3] for a in shorts for b in shorts if a[1] != b[1]), "none ran beside another"
    assert [name for name, *_ in alone] == ["test_alone[0]", "test_alone[1]"]
    assert {pid for _, pid, _, _ in alone} == {process.pid}
    assert min(began for _, _, began, _ in alone) > max(ended for *_, ended in shorts)


@pytest.mark.parametrize("number", [2, 29])
def test_a_failure_in_either_process_fails_the_run_and_is_shown(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, f"assert number != {number}")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 31 passed" in said
    assert f"FAILED test_probe.py::test_short[{number}]" in said
    assert f"said by {number}" in said


def test_a_process_that_dies_fails_what_it_had_taken_and_the_other_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "number == 3 and os.kill(os.getpid(), signal.SIGKILL)")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    (counts,) = re.findall(r"(\d+) failed, (\d+) passed", said)
    assert sum(map(int, counts)) == 32
    assert int(counts[0]) == 5, "the third of the first eight, and those that it was to run after that"
    assert "the process that ran this test ended with -9, in test_probe.py::test_short[3]" in said


def test_interrupted_it_leaves_no_process_even_where_a_test_takes_the_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "\n    try:\n        time.sleep(1)\n    except KeyboardInterrupt:\n        pass")
    deadline = time.monotonic() + 60
    while len(workers := psutil.Process(process.pid).children()) < 2 or not (tmp_path / "log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
        assert process.returncode == pytest.ExitCode.INTERRUPTED
        assert not any(worker.is_running() for worker in workers)
    finally:
        process.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
    assert len(ran(tmp_path)) < 30


FORKING = """
import json, os, time, pytest

@pytest.mark.parametrize("number", range(20))
def test_forking(number):
    began = time.monotonic()
    time.sleep(0.1)
    with open("log", "a") as file:
        file.write(json.dumps([f"test_forking[{number}]", os.getpid(), began, time.monotonic()]) + "\\n")
"""


def test_tests_that_fork_ranks_run_in_one_process_before_all_others_of_it(tmp_path: Path) -> None:
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "test_forking.py").write_text(FORKING)
    process = start(tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "52 passed" in said
    forking = [line for line in ran(tmp_path) if "forking" in line[0]]
    (pid,) = {line[1] for line in forking}
    others = [line for line in ran(tmp_path) if line[1] == pid and "forking" not in line[0]]
    assert all(line[2] > max(one[3] for one in forking) for line in others)
