"""Ranks that hang: they are found, named and started again; ranks that are only slow are let be."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from meshwright.errors import ExitCode
from tests.chaos.runs import Training, assert_same_run, events, fault_time, kill, print_cost, report, start

TIGHT = ("elastic.hang_floor_s=3.0", "elastic.hang_factor=3.0")
FLOOR_S = 3.0


def hang_report(folder: Path) -> str:
    """The one report of a hang that a run folder has."""
    (path,) = (folder / "hangs").iterdir()
    return path.read_text()


def told(case: str, folder: Path, rank: int, within: float) -> dict:
    """The one hang of a run, of that rank, found in that time."""
    report(case, folder)
    (hang,) = events(folder, "hang")
    assert hang["ranks"] == [rank], hang
    (failed,) = events(folder, "failed")
    assert failed["rank"] == rank
    assert failed["detect_s"] < within, failed
    return hang


def test_stopped_rank_is_found_with_its_line_and_what_the_others_wait_for(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    training = start(tmp_path, settings, *TIGHT, fault="rank=1,step=7,phase=backward,kind=sigstop")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    hang = told("SIGSTOP", training.folder, 1, within=FLOOR_S + 12)
    assert "rank 1" in hang["text"]
    assert "stopped by a signal in backward of step 7" in hang["text"]
    text = hang_report(training.folder)
    assert "rank 0 waits in all_reduce number" in text
    assert "where rank 1 did not arrive" in text
    # The line that it was stopped at, and how it came there.
    assert "meshwright/faults.py" in text
    assert "in TrainingStep.__call__" in text
    assert_same_run(training.folder, undisturbed)


def test_rank_that_is_stopped_for_a_while_is_let_be(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    # The rest of the run takes a while, so that somebody can see that it goes on.
    fault = "rank=1,step=7,phase=backward,kind=sigstop;step=10,phase=data,kind=sleep:2"
    training = start(tmp_path, settings, "elastic.hang_floor_s=30.0", fault=fault)
    training.wait_for_event("warning")
    kill(training.ranks()[1], signal.SIGCONT)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert events(training.folder, "failed") == []
    (warning,), (cleared,) = events(training.folder, "warning"), events(training.folder, "cleared")
    assert warning["ranks"] == cleared["ranks"] == [1]
    noticed = warning["time"] - fault_time(training.folder, "sigstop")
    print_cost("SIGSTOP, then SIGCONT", noticed, None, 0, "a warning, no restart")
    assert "stopped by a signal in backward of step 7" in warning["text"]
    assert_same_run(training.folder, undisturbed)


def test_rank_that_holds_the_gil_is_found_and_its_stack_seen(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    training = start(tmp_path, settings, *TIGHT, fault="rank=1,step=7,phase=forward,kind=gil")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    told("GIL held", training.folder, 1, within=FLOOR_S + 15)
    text = hang_report(training.folder)
    assert "holds the GIL" in text
    assert "in match" in text  # The regular expression that never ends.
    assert "in forward of step 7" in text
    assert_same_run(training.folder, undisturbed)


def test_gil_hang_is_named_without_py_spy(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    training = start(tmp_path, settings, *TIGHT, fault="rank=1,step=7,phase=forward,kind=gil", MESHWRIGHT_PY_SPY="")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    told("GIL held, no py-spy", training.folder, 1, within=FLOOR_S + 15)
    text = hang_report(training.folder)
    assert "by faulthandler" in text
    assert "in match" in text
    assert_same_run(training.folder, undisturbed)


def test_rank_that_skips_a_collective_is_named_with_both_collectives(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=1,step=7,phase=reduce,kind=all_reduce:skip"
    training = start(tmp_path, settings, *TIGHT, "parallel.strategy=dp=2 zero=3", fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    report("a skipped collective", training.folder)
    (hang,) = events(training.folder, "hang")
    assert re.search(
        r"ranks disagree in collective \d+ of the group of all ranks \(ranks 0 1\): "
        r"rank 0 called all_reduce of \[\] double, rank 1 called all_reduce of \[\d+\] double",
        hang["text"],
    ), hang["text"]


def test_rank_that_skips_a_collective_waits_in_another_group(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=1,step=7,phase=reduce,kind=all_reduce:skip"
    training = start(tmp_path, settings, *TIGHT, "parallel.strategy=dp=2 tp=2", nproc=4, fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    report("a skipped collective, four ranks", training.folder)
    (hang,) = events(training.folder, "hang")
    assert hang["ranks"] == [0, 1]
    assert re.search(
        r"ranks 1 2 3 wait in all_reduce number \d+ of the group of all ranks .*, where rank 0 did not arrive; "
        r"rank 0 waits in all_reduce number \d+ of the group 'tp' \(ranks 0 1\), where rank 1 did not arrive",
        hang["text"],
    ), hang["text"]


def test_rank_that_calls_another_collective_is_named(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    training = start(tmp_path, settings, *TIGHT, fault="rank=1,step=7,phase=reduce,kind=all_reduce:other")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    report("another collective", training.folder)
    (hang,) = events(training.folder, "hang")
    assert re.search(
        r"rank 0 called all_reduce of \[(\d+)\] double, rank 1 called all_gather of \[\1\] double", hang["text"]
    )
    assert_same_run(training.folder, undisturbed)


@pytest.mark.parametrize(("how", "call"), [("shape", r"\[\d+\] double"), ("dtype", r"\[\1\] half")])
def test_tensors_that_differ_in_a_collective_are_named_without_a_wait(
    how: str, call: str, settings: list[str], tmp_path: Path
) -> None:
    """gloo aborts one of the ranks; started again with checks, both say what they called."""
    fault = f"rank=1,step=7,phase=reduce,kind=all_reduce:{how},generation=any"
    training = start(tmp_path, settings, *TIGHT, "elastic.same_step_failures=2", fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.NO_PROGRESS, ended.err
    aborted, checked = events(training.folder, "failed")
    assert aborted["cause"] == "ended by SIGABRT inside a collective"
    assert "inside all_reduce at meshwright/" in ended.err
    said = re.search(
        rf"rank 0 called all_reduce of \[(\d+)\] double, rank 1 called all_reduce of {call}", checked["cause"]
    )
    assert said, checked["cause"]
    assert events(training.folder, "hang") == []
    report(f"another {how} in a collective", training.folder)


def test_stage_that_waits_for_another_is_not_to_blame(settings: list[str], tmp_path: Path) -> None:
    """Of a pipeline's transfers no recorder knows: the ranks themselves say whom they wait for."""
    fault = "rank=0,step=7,phase=forward,kind=sleep:100"
    training = start(tmp_path, settings, *TIGHT, "parallel.strategy=pp=2 dp=1", "train.micro_batch=2", fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    told("a stage asleep", training.folder, 0, within=FLOOR_S + 15)
    assert "waits for what rank 0 sends to it" in hang_report(training.folder)


@pytest.mark.slow_chaos
def test_slow_rank_is_let_be(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    fault = "rank=1,phase=forward,kind=sleep:0.5,times=15;rank=1,phase=optimizer,kind=sleep:0.2,times=10"
    training = start(tmp_path, settings, *TIGHT, fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    for kind in ("hang", "warning", "failed"):
        assert events(training.folder, kind) == []
    assert_same_run(training.folder, undisturbed)


@pytest.mark.slow_chaos
@pytest.mark.parametrize("phase", ["stage", "evaluate"])
def test_waiting_for_a_long_save_or_evaluation_raises_no_alarm(
    phase: str, settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    """The first one may take long; the other rank, far over its own limit, only waits for it."""
    settings = [*settings, "train.eval_every=6"] if phase == "evaluate" else settings
    training = start(tmp_path, settings, *TIGHT, fault=f"rank=0,phase={phase},kind=sleep:10")
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    for kind in ("hang", "warning", "failed"):
        assert events(training.folder, kind) == []
    assert_same_run(training.folder, undisturbed)


CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* A day ahead or behind, other in every process, and it changes each second. */
static long jump(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return ((now.tv_sec + getpid()) % 2 ? 1 : -1) * 86400L;
}
int clock_gettime(clockid_t clock, struct timespec *found) {
    int code = syscall(SYS_clock_gettime, clock, found);
    if (clock == CLOCK_REALTIME) found->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.slow_chaos
def test_wall_clock_that_jumps_raises_no_alarm_and_hides_no_hang(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    shim = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, tmp_path / "clock.c"], check=True)
    fault = "phase=data,kind=sleep:0.3,times=10;rank=1,step=12,phase=backward,kind=sigstop"
    training = start(tmp_path, settings, *TIGHT, fault=fault, LD_PRELOAD=str(shim))
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    times = [line["time"] for line in events(training.folder)]
    assert max(times) - min(times) > 86400, "the clock did not jump"
    told("a wall clock that jumps", training.folder, 1, within=FLOOR_S + 12)
    assert_same_run(training.folder, undisturbed)


@pytest.mark.slow_chaos
def test_restore_that_stalls_on_one_rank_is_bounded_and_named(settings: list[str], tmp_path: Path) -> None:
    first = start(tmp_path, settings, "train.steps=5")
    assert first.wait().code == ExitCode.DONE
    fault = "rank=1,phase=restore,kind=sleep:300"
    training = start(tmp_path, settings, *TIGHT, "train.steps=8", "elastic.first_timeout_s=6.0", fault=fault)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    hang = told("a restore that stalls", training.folder, 1, within=6 + 12)
    assert "stuck in restore" in hang["text"]
    assert "elastic.first_timeout_s" in hang_report(training.folder)


def watchdog_of(training: Training) -> psutil.Process:
    found = [child for child in training.launcher.children() if "meshwright.elastic.watchdog" in child.cmdline()]
    (watchdog,) = found
    return watchdog


@pytest.mark.slow_chaos
def test_watchdog_that_is_stopped_holds_up_nothing_and_raises_no_alarm_afterwards(
    settings: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    fault = "phase=data,kind=sleep:0.5,times=12"
    training = start(tmp_path, settings, *TIGHT, fault=fault)
    training.wait_for_step(2)
    watchdog = watchdog_of(training)
    kill(watchdog, signal.SIGSTOP)
    before = training.folder / "metrics.jsonl"
    training.wait_for_step(10)
    # Steps went on, at the pace of their data, for longer than any limit.
    kill(watchdog, signal.SIGCONT)
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert before.exists()
    for kind in ("hang", "warning", "failed"):
        assert events(training.folder, kind) == []
    assert_same_run(training.folder, undisturbed)


@pytest.mark.slow_chaos
def test_watchdog_that_is_killed_is_started_again(settings: list[str], tmp_path: Path, undisturbed: Path) -> None:
    fault = "phase=data,kind=sleep:0.5,times=8;rank=1,step=14,phase=backward,kind=sigstop"
    training = start(tmp_path, settings, *TIGHT, fault=fault)
    training.wait_for_step(2)
    kill(watchdog_of(training))
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    assert "the watchdog has ended and is started again" in ended.err
    told("after a watchdog was killed", training.folder, 1, within=FLOOR_S + 12)
    assert_same_run(training.folder, undisturbed)
