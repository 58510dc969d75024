"""What the watchdog makes of one real process, with a clock in the test's hands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.elastic import watchdog as module
from meshwright.elastic.limits import Limits
from meshwright.elastic.watchdog import Watchdog

RANK = """
import sys, time
from pathlib import Path
from meshwright.pulse import Pulse


pulse = Pulse(0, Path(sys.argv[1]) / "0.pulse")
for step in range(5):
    pulse.step = step
    for phase in ("data", "forward", "backward"):
        pulse.enter(phase)
print("ready", flush=True)
for line in sys.stdin:
    if line == "next\\n":
        pulse.enter("optimizer")
        print("done", flush=True)
"""
LIMITS = Limits(first_s=100, factor=2, floor_s=10)


class Clock:
    """A monotonic clock that the test moves; it goes by itself as well, for waits inside the watchdog."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5000.0
        fake = SimpleNamespace(monotonic=lambda: self.now + time.monotonic(), sleep=time.sleep)
        monkeypatch.setattr(module, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank that has done five steps and waits in the backward pass of the last."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    said = {"generation": 2, "host": "here", "run_dir": str(tmp_path / "run"), "ranks": {"0": process.pid}}
    (tmp_path / "ranks.json").write_text(json.dumps(said))
    yield process
    process.kill()
    process.communicate()


def watch(watchdog: Watchdog, clock: Clock, seconds: float, every: float = 1.0) -> list[dict[str, Any]]:
    """What it tells in that time."""
    lines = []
    for _ in range(int(seconds / every)):
        clock.now += every
        lines += watchdog.look()
    return lines


def test_rank_that_stays_in_a_phase_is_told_after_its_limit_and_only_once(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path
) -> None:
    watchdog = Watchdog(tmp_path, LIMITS)
    assert watch(watchdog, clock, 9) == []
    (line,) = watch(watchdog, clock, 60)
    assert (line["kind"], line["ranks"], line["cause"]) == ("hang", [0], "late")
    assert "rank 0 on here is stuck in backward of step 4" in line["text"]
    text = Path(line["report"]).read_text()
    assert "generation 2" in text
    assert "elastic.hang_floor_s=10" in text
    assert watch(watchdog, clock, 60) == []


def test_time_that_nobody_saw_pass_does_not_count(rank: subprocess.Popen[str], clock: Clock, tmp_path: Path) -> None:
    """The machine was suspended, or the watchdog: what a clock says then says nothing of a rank."""
    watchdog = Watchdog(tmp_path, LIMITS)
    watchdog.look()
    for _ in range(4):
        clock.now += 3600
        assert watchdog.look() == []


def test_clock_of_the_rank_is_never_compared_with_that_of_the_watchdog(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path
) -> None:
    """Containers may have monotonic clocks of their own: here they are days apart."""
    clock.now = 3 * 86400
    assert watch(Watchdog(tmp_path, LIMITS), clock, 9) == []
    clock.now = -3 * 86400
    assert watch(Watchdog(tmp_path, LIMITS), clock, 9) == []


def test_rank_that_goes_on_is_let_be(rank: subprocess.Popen[str], clock: Clock, tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, LIMITS)
    assert rank.stdin is not None
    assert rank.stdout is not None
    for _ in range(5):
        assert watch(watchdog, clock, 9) == []
        print("next", file=rank.stdin, flush=True)
        rank.stdout.readline()


def test_rank_whose_stack_moves_is_warned_of_and_cleared(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.take_stacks
    seen = []

    def moved(*arguments: Any) -> Any:
        stacks = real(*arguments)
        seen.append(stacks)
        # Each time it is one line further.
        return module.replace(stacks, main=(module.Frame("model.py", len(seen), "layer"), *stacks.main))

    monkeypatch.setattr(module, "take_stacks", moved)
    watchdog = Watchdog(tmp_path, LIMITS)
    (line,) = watch(watchdog, clock, 40)
    assert (line["kind"], line["ranks"]) == ("warning", [0])
    assert "slow rather than stuck" in line["text"]
    assert rank.stdin is not None
    assert rank.stdout is not None
    print("next", file=rank.stdin, flush=True)
    rank.stdout.readline()
    (line,) = watch(watchdog, clock, 2)
    assert (line["kind"], line["ranks"]) == ("cleared", [0])
    # It may be slow, but not for ever.
    assert [line["kind"] for line in watch(watchdog, clock, 400)] == ["hang"]


def test_pulse_of_an_earlier_generation_is_not_believed(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path
) -> None:
    """A new rank that has said nothing yet has the long limit, whatever its predecessor learned."""
    newcomer = subprocess.Popen(["sleep", "60"])
    try:
        said = {"generation": 3, "host": "here", "run_dir": str(tmp_path), "ranks": {"0": newcomer.pid}}
        (tmp_path / "ranks.json").write_text(json.dumps(said))
        watchdog = Watchdog(tmp_path, LIMITS)
        assert watch(watchdog, clock, 40) == []
        (line,) = watch(watchdog, clock, 100)
        assert "before its first step" in line["text"]
    finally:
        newcomer.kill()
        newcomer.wait()


def test_next_generation_is_watched_from_the_beginning(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path
) -> None:
    watchdog = Watchdog(tmp_path, LIMITS)
    assert [line["kind"] for line in watch(watchdog, clock, 60)] == ["hang"]
    said = json.loads((tmp_path / "ranks.json").read_text()) | {"generation": 3}
    (tmp_path / "ranks.json").write_text(json.dumps(said))
    assert watch(watchdog, clock, 9) == []
    assert [line["kind"] for line in watch(watchdog, clock, 60)] == ["hang"]


def test_number_of_a_process_that_somebody_else_has_now_is_not_the_rank(
    rank: subprocess.Popen[str], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(tmp_path, LIMITS)
    watchdog.look()
    real: Callable[[int], Any] = module.process_state

    def later(pid: int) -> Any:
        found = real(pid)
        return module.replace(found, started=found.started + 1) if pid == rank.pid else found

    monkeypatch.setattr(module, "process_state", later)
    lines = watch(watchdog, clock, 9)
    assert [(line["kind"], line["cause"]) for line in lines] == [("hang", "gone")]


def _ignores(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ignored,) = (line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("how", ["input", "parent"])
def test_watchdog_ends_with_who_started_it(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright.elastic.watchdog", str(tmp_path)]
    if how == "input":
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        while not _ignores(process.pid, signal.SIGTERM):
            time.sleep(0.05)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None, "a stop signal is for the ranks, which it still watches"
        process.communicate(timeout=20)
        assert process.returncode == 0
        return
    # It may well be gone before its child has begun.
    parent = (
        "import os, subprocess, sys\n"
        f"command = {command!r} + ['--parent', str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=open('/dev/zero'), stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)"
    )
    started = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    pid = int(started.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = Path(f"/proc/{pid}").exists()
    if alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


@pytest.mark.alone
def test_watchdog_starts_fast(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        command = [sys.executable, "-m", "meshwright.elastic.watchdog", str(tmp_path / "nowhere")]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    # Without torch it takes a fifth of a second; with it, several.
    assert min(seconds) < 1, seconds
