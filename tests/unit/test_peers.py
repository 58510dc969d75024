"""What watchdogs of two machines, each with one real process as its rank, make of each other's words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.elastic import watchdog as module
from meshwright.elastic.limits import Limits
from meshwright.elastic.peers import TOLD, heard_from
from meshwright.elastic.watchdog import Watchdog

RANK = """
import sys
from pathlib import Path
from meshwright.pulse import Pulse

folder, rank, waits_for = sys.argv[1:]
pulse = Pulse(int(rank), Path(folder) / f"{rank}.pulse")
for step in range(5):
    pulse.step = step
    for phase in ("data", "forward", "backward"):
        pulse.enter(phase)
if waits_for:
    waiting = pulse.waiting_for(int(waits_for))
    waiting.__enter__()
print("ready", flush=True)
sys.stdin.read()
"""
LIMITS = Limits(first_s=100, factor=2, floor_s=10)


class Machine:
    """A machine with one rank and its watchdog."""

    def __init__(self, folder: Path, node: int, waits_for: str) -> None:
        self.folder, self.node = folder, node
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(node), waits_for],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        ranks = {str(node): self.process.pid}
        said = {"generation": 0, "host": f"host-{node}", "run_dir": str(folder / "run"), "world": 2, "ranks": ranks}
        (folder / "ranks.json").write_text(json.dumps(said))
        self.watchdog = Watchdog(folder, LIMITS)

    def hear(self, other: Machine) -> None:
        if (other.folder / TOLD).exists():
            shutil.copy(other.folder / TOLD, self.folder / heard_from(other.node))


class Clock:
    now = 5000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now + time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(module, "time", fake)
    return clock


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Machine]:
    """Its rank waits for that of the other machine."""
    machine = Machine(tmp_path / "waiting", 0, "1")
    yield machine
    end(machine)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "stuck", 1, "")
    yield machine
    end(machine)


def end(machine: Machine) -> None:
    machine.process.kill()
    machine.process.communicate()


def watch(clock: Clock, seconds: float, *machines: Machine, connected: bool = True) -> dict[int, list[dict[str, Any]]]:
    """What each machine tells in that time."""
    told: dict[int, list[dict[str, Any]]] = {machine.node: [] for machine in machines}
    for _ in range(int(seconds)):
        clock.now += 1
        for machine in machines:
            told[machine.node] += machine.watchdog.look()
        for machine in machines:
            for other in machines:
                if other is not machine and connected:
                    machine.hear(other)
    return told


def test_report_of_the_guilty_machine_shows_who_waits_elsewhere(waiting: Machine, stuck: Machine, clock: Clock) -> None:
    os.kill(stuck.process.pid, signal.SIGSTOP)
    told = watch(clock, 20, stuck, waiting)
    assert [line["kind"] for line in told[1]] == ["warning", "hang"]
    assert "rank 1 on host-1 is stopped by a signal" in told[1][-1]["text"]
    text = Path(told[1][-1]["report"]).read_text()
    assert f"rank 0 on host-0 (process {waiting.process.pid})" in text
    assert "waits for what rank 1 sends to it" in text


def test_machine_that_waits_tells_of_the_guilty_one_when_that_does_not(
    waiting: Machine, stuck: Machine, clock: Clock
) -> None:
    os.kill(stuck.process.pid, signal.SIGSTOP)
    lines: list[dict[str, Any]] = []
    for _ in range(40):
        # That it told a hang there changed nothing: its supervisor does not answer any more.
        watch(clock, 1, stuck)
        if stuck.watchdog._ranks is not None:
            stuck.watchdog._ranks.told = False
        waiting.hear(stuck)
        lines += watch(clock, 1, waiting)[0]
        stuck.hear(waiting)
    (hang,) = lines
    assert (hang["kind"], hang["ranks"]) == ("hang", [1])
    assert hang["elsewhere"]["host"] == "host-1"
    assert (hang["elsewhere"]["phase"], hang["elsewhere"]["step"]) == ("backward", 4)
    assert "rank 1 on host-1 is stopped by a signal in backward of step 4" in hang["text"]


def test_machines_without_word_of_each_other_blame_no_rank_that_waits(waiting: Machine, clock: Clock) -> None:
    assert watch(clock, 90, waiting)[0] == []
    (hang,) = watch(clock, 60, waiting)[0]
    assert (hang["ranks"], hang["cause"]) == ([], "unseen")


def test_what_was_told_long_ago_is_not_believed(waiting: Machine, stuck: Machine, clock: Clock) -> None:
    os.kill(stuck.process.pid, signal.SIGSTOP)
    watch(clock, 9, stuck, waiting)
    os.kill(stuck.process.pid, signal.SIGCONT)
    told = watch(clock, 60, waiting)
    assert told[0] == [], "the other machine has been silent since"


def test_asking_each_other_comes_to_rest(waiting: Machine, stuck: Machine, clock: Clock) -> None:
    """Ranks that are late for a good reason are not looked at again and again because others look."""
    looks = 0
    judge = Watchdog._judge

    def counted(self: Watchdog, *views: Any, **options: Any) -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        return judge(self, *views, **options)

    Watchdog._judge = counted  # type: ignore[method-assign]
    try:
        stuck.watchdog.limits = waiting.watchdog.limits = Limits(first_s=10_000, factor=1e9, floor_s=10)
        assert watch(clock, 30, stuck, waiting) == {0: [], 1: []}
        looks = 0
        assert watch(clock, 120, stuck, waiting) == {0: [], 1: []}
    finally:
        Watchdog._judge = judge  # type: ignore[method-assign]
    # A round every thirty seconds: each machine looks once by itself and at most twice more, for what it hears.
    assert 0 < looks <= 2 * 3 * 120 / 30
