"""What a rank says of itself, and what a reader outside makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.pulse import NOBODY, PHASES, Pulse, read_pulse


def test_reader_sees_phase_step_and_how_long_phases_took(tmp_path: Path) -> None:
    path = tmp_path / "0.pulse"
    pulse = Pulse(0, path)
    assert read_pulse(path) is None
    pulse.step = 7
    pulse.enter("forward")
    time.sleep(0.05)
    pulse.enter("backward")
    time.sleep(0.01)
    pulse.enter("forward")
    pulse.enter("optimizer")
    beat = read_pulse(path)
    assert beat is not None
    assert (beat.pid, beat.step, beat.phase, beat.entered) == (os.getpid(), 7, "optimizer", 4)
    assert beat.ended["forward"] == 2
    assert beat.ended["backward"] == 1
    assert beat.ended["optimizer"] == 0
    assert 0.05 <= beat.longest["forward"] < 5
    assert 0.01 <= beat.longest["backward"] < beat.longest["forward"]


def test_phase_inside_another_gives_way_to_it_again(tmp_path: Path) -> None:
    path = tmp_path / "0.pulse"
    pulse = Pulse(0, path)
    pulse.enter("hooks")
    with pulse.during("evaluate"):
        assert read_pulse(path).phase == "evaluate"  # type: ignore[union-attr]
    beat = read_pulse(path)
    assert beat is not None
    assert (beat.phase, beat.ended["evaluate"]) == ("hooks", 1)


def test_other_threads_do_not_speak_for_the_rank(tmp_path: Path) -> None:
    """A save in the background must not make a stuck rank look alive."""
    path = tmp_path / "0.pulse"
    pulse = Pulse(0, path)
    pulse.enter("forward")
    thread = threading.Thread(target=pulse.enter, args=("write",))
    thread.start()
    thread.join()
    beat = read_pulse(path)
    assert beat is not None
    assert (beat.phase, beat.entered) == ("forward", 1)


def test_rank_says_whom_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "0.pulse"
    pulse = Pulse(0, path)
    pulse.enter("forward")
    with pulse.waiting_for(3):
        assert read_pulse(path).waits_for == 3  # type: ignore[union-attr]
    assert read_pulse(path).waits_for == NOBODY  # type: ignore[union-attr]


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    pulse = Pulse()
    pulse.enter("forward")
    with pulse.during("evaluate"), pulse.waiting_for(1):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alone
def test_seconds_of_phases_add_up_to_the_time_that_passed() -> None:
    """Also when nobody watches from outside."""
    pulse = Pulse()
    began = time.monotonic()
    pulse.enter("forward")
    time.sleep(0.03)
    with pulse.during("evaluate"):
        time.sleep(0.02)
    pulse.enter("backward")
    now = time.monotonic()
    spent = dict(zip(PHASES, pulse.spent_until(now), strict=True))
    assert spent["forward"] >= 0.03
    assert spent["evaluate"] >= 0.02
    assert sum(spent.values()) == pytest.approx(now - began, abs=1e-3)
    later = dict(zip(PHASES, pulse.spent_until(now + 5), strict=True))
    assert later["backward"] == pytest.approx(spent["backward"] + 5)


def test_listeners_hear_of_every_phase_of_the_rank_and_of_no_other_thread() -> None:
    pulse, heard = Pulse(), []
    pulse.listeners.append(lambda phase, now: heard.append((phase, now)))
    pulse.enter("forward")
    thread = threading.Thread(target=pulse.enter, args=("write",))
    thread.start()
    thread.join()
    with pulse.during("evaluate"):
        pass
    assert [phase for phase, _ in heard] == ["forward", "evaluate", "forward"]
    assert sorted(now for _, now in heard) == [now for _, now in heard]


def test_waits_for_other_ranks_are_kept_while_somebody_wants_them() -> None:
    pulse = Pulse()
    with pulse.waiting_for(1):
        pass
    assert pulse.waits is None
    pulse.waits = []
    with pulse.waiting_for(1):
        time.sleep(0.01)
    ((begin, end),) = pulse.waits
    assert end - begin >= 0.01


ENTERING = """
import sys
from pathlib import Path
from meshwright.pulse import Pulse
pulse = Pulse(path=Path(sys.argv[1]))
pulse.enter("forward")
pulse.enter("backward")
print("begins", flush=True)
while True:
    pulse.enter("forward")
    pulse.enter("backward")
"""


def test_what_a_rank_says_while_somebody_looks_is_whole(tmp_path: Path) -> None:
    before = time.monotonic()
    path = tmp_path / "0.pulse"
    rank = subprocess.Popen([sys.executable, "-c", ENTERING, str(path)], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        beats = [read_pulse(path) for _ in range(5000)]
    finally:
        rank.kill()
        rank.communicate()
    assert all(beat is not None and beat.pid == rank.pid and beat.since >= before for beat in beats)
