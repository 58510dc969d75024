"""Several machines, each a network namespace: lost, returned, drained, cut off, frozen; the run stays the same run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from tests.chaos.machines import Machines, until
from tests.chaos.runs import (
    assert_near_run,
    checkpoints,
    events,
    last_step,
    metrics,
    print_cost,
    report,
    start,
    wait_until_gone,
)

NODES = "2:4"
STEPS = 40
# Slow enough for something to happen meanwhile.
SLOW = "phase=data,kind=sleep:0.1,times=100000,generation=any"
CHANGES = [f"train.steps={STEPS}", "train.global_batch=12", "train.precision=float64", "elastic.join_timeout_s=90"]
HANGS = ["train.steps=12", "train.precision=float64", "elastic.hang_floor_s=3.0", "elastic.hang_factor=3.0"]
slow_chaos = pytest.mark.slow_chaos


@pytest.fixture(scope="session")
def reference(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks of one machine."""
    training = start(tmp_path_factory.mktemp("one-machine"), settings, *CHANGES)
    assert training.wait().code == 0
    return training.folder


@pytest.fixture
def machines(settings: list[str], tmp_path: Path) -> Iterator[Machines]:
    with Machines(3, tmp_path, [*settings]) as made:
        yield made


def resumed(folder: Path) -> list[tuple[int, int]]:
    """(step, ranks) of every start of ranks so far."""
    return [(line["step"], line["ranks"]) for line in events(folder) if line["event"] in ("started", "resumed")]


def started_with(folder: Path, ranks: int, starts: int) -> bool:
    """Whether the ranks have been started that often, the last time that many."""
    found = resumed(folder)
    return len(found) >= starts and found[-1][1] == ranks


def test_machine_that_is_lost_and_returns_costs_steps_but_no_samples(machines: Machines, reference: Path) -> None:
    # The run must still be on when the machine's new processes have started, also where other work slows them down.
    slow = SLOW.replace("sleep:0.1", "sleep:0.3")
    a, b, c = (machines.train(name, *CHANGES, nodes=NODES, fault=slow) for name in "abc")
    folder = a.folder
    until(lambda: last_step(folder) >= 7, "step 7")
    at = len(resumed(folder))
    assert resumed(folder)[-1][1] == 3
    # Where one of them was slow to start, the others had begun without it.
    before = len(events(folder, "stopped"))
    # Its agent alone: the ranks must not train on as orphans.
    ranks = c.launcher.children(recursive=True)
    c.launcher.kill()
    c.process.communicate()
    wait_until_gone(ranks, 10)
    lost = until(lambda: started_with(folder, 2, at + 1), "a start of two machines")
    assert last_step(folder) >= checkpoints(folder)[-1] >= 5
    again = machines.train("c", *CHANGES, nodes=NODES, fault=slow)
    back = until(lambda: started_with(folder, 3, at + 2), "a start of three machines")
    # Who comes in is announced: the others save first, and no step is done again.
    (stopped,) = events(folder, "stopped")[before:]
    assert stopped["step"] == resumed(folder)[-1][0]
    for training in (a, b, again):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
    assert_near_run(folder, reference)
    (failed,) = events(folder, "failed")
    assert (failed["host"], failed["cause"]) == ("c", "machine lost")
    report("machine lost", folder, f"two others have started again {lost:.1f} s after its end")
    print_cost("machine returned", None, back, 0, "with the start of its processes; all saved first")
    assert back < 60


def test_machine_that_is_cut_off_ends_and_the_others_go_on(machines: Machines, reference: Path) -> None:
    a, b, c = (machines.train(name, *CHANGES, nodes=NODES, fault=SLOW) for name in "abc")
    until(lambda: last_step(a.folder) >= 7, "step 7")
    at = len(resumed(a.folder))
    # The one that has the first rank and holds the run folder.
    machines.cut("a")
    began = time.monotonic()
    noticed = until(lambda: started_with(a.folder, 2, at + 1), "a start of two machines")
    ended = a.wait(60)
    note = (
        f"the others have started again {noticed:.1f} s after the cut, it ended after {time.monotonic() - began:.1f} s"
    )
    report("machine cut off", a.folder, note)
    assert ended.code == ExitCode.PARTITIONED, ended.err
    assert machines.endpoint in ended.err
    for training in (b, c):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
    assert_near_run(a.folder, reference)


@slow_chaos
def test_cut_that_heals_in_time_goes_unnoticed(machines: Machines, reference: Path) -> None:
    a, b = (machines.train(name, *CHANGES, nodes="2", fault=SLOW) for name in "ab")
    until(lambda: last_step(a.folder) >= 7, "step 7")
    machines.cut("b")
    time.sleep(1.0)
    machines.mend("b")
    for training in (a, b):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
    assert events(a.folder, "failed") == []
    assert_near_run(a.folder, reference)


@slow_chaos
def test_machine_that_was_taken_for_dead_and_wakes_up_writes_nothing(machines: Machines, reference: Path) -> None:
    a, b, c = (machines.train(name, *CHANGES, nodes=NODES, fault=SLOW) for name in "abc")
    until(lambda: last_step(a.folder) >= 7, "step 7")
    at = len(resumed(a.folder))
    frozen = [a.launcher, *a.launcher.children(recursive=True)]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    until(lambda: started_with(a.folder, 2, at + 1), "a start of two machines")
    until(lambda: last_step(a.folder) >= 12, "step 12")
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    for training in (a, b, c):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
    assert [line["step"] for line in metrics(a.folder)] == list(range(1, STEPS + 1))
    assert_near_run(a.folder, reference)


def test_store_that_is_lost_is_named_and_the_run_is_saved(machines: Machines) -> None:
    a, b = (machines.train(name, *CHANGES, "checkpoint.every=1000", nodes="2", fault=SLOW) for name in "ab")
    until(lambda: last_step(a.folder) >= 5, "step 5")
    began = time.monotonic()
    store = machines.processes[0]
    store.kill()
    ended = [training.wait(60) for training in (a, b)]
    print_cost("store lost", None, None, 0, f"saved and ended after {time.monotonic() - began:.1f} s")
    for one in ended:
        assert one.code == ExitCode.PARTITIONED, one.err
        assert f"the store at {machines.endpoint} cannot be reached" in one.err
        assert "Traceback" not in one.err
    assert checkpoints(a.folder) == [last_step(a.folder)]


@slow_chaos
def test_machine_that_is_drained_leaves_the_others_training(machines: Machines, reference: Path) -> None:
    a, b, c = (machines.train(name, *CHANGES, nodes=NODES, fault=SLOW) for name in "abc")
    until(lambda: last_step(a.folder) >= 7, "step 7")
    at = len(resumed(a.folder))
    a.launcher.send_signal(signal.SIGTERM)
    assert a.wait(30).code == ExitCode.PREEMPTED
    until(lambda: started_with(a.folder, 2, at + 1), "a start of two machines")
    assert events(a.folder, "stopped")[-1]["step"] == resumed(a.folder)[-1][0], "nothing is done again"
    for training in (b, c):
        assert training.wait().code == ExitCode.DONE
    assert events(a.folder, "failed") == []
    assert_near_run(a.folder, reference)


@slow_chaos
def test_killed_rank_of_one_machine_restarts_all_of_them(machines: Machines, reference: Path) -> None:
    fault = f"{SLOW};rank=1,step=9,phase=backward,kind=sigkill"
    a, b = (machines.train(name, *CHANGES, nodes="2", fault=fault) for name in "ab")
    for training in (a, b):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
        assert "rank 1 of 2 was ended by SIGKILL" in ended.err, "every machine is told the cause"
    (failed,) = events(a.folder, "failed")
    assert (failed["host"], failed["rank"], failed["step"]) == ("b", 1, 9)
    report("kill -9 of a rank of one of two machines", a.folder)
    assert_near_run(a.folder, reference)


def test_stopped_rank_is_named_with_its_machine_and_the_waiting_ranks_of_the_others(machines: Machines) -> None:
    fault = "rank=1,step=7,phase=backward,kind=sigstop"
    a, b = (machines.train(name, *HANGS, nodes="2", fault=fault) for name in "ab")
    for training in (a, b):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
        assert "rank 1 of 2 on b: hangs" in ended.err, "every machine is told who it was, and none blames its own"
        assert "rank 1 on b is stopped by a signal in backward of step 7" in ended.err
    report("SIGSTOP of a rank on another machine", a.folder)
    (hang,) = events(a.folder, "hang")
    assert (hang["host"], hang["ranks"]) == ("b", [1])
    text = Path(hang["report"]).read_text()
    assert "Hold up the others: rank 1 on b." in text
    assert re.search(r"rank 0 waits in all_reduce number \d+ of .*, where rank 1 did not arrive", text), text
    assert re.search(r"rank 0 on a \(process \d+\)\n    in \w+ of step 7", text), text


def test_ranks_of_two_machines_that_disagree_are_named(machines: Machines) -> None:
    """Each machine alone sees only that its rank waits for the other."""
    fault = "rank=1,step=7,phase=reduce,kind=all_reduce:skip"
    strategy = "parallel.strategy=dp=2 zero=3"
    a, b = (machines.train(name, *HANGS, strategy, nodes="2", fault=fault) for name in "ab")
    for training in (a, b):
        ended = training.wait()
        assert ended.code == ExitCode.DONE, ended.err
    report("ranks of two machines disagree", a.folder)
    text = events(a.folder, "hang")[0]["text"]
    assert re.search(
        r"ranks disagree in collective \d+ of the group of all ranks \(ranks 0 1\): "
        r"rank 0 called all_reduce of \[\] double, rank 1 called all_reduce of \[\d+\] double",
        text,
    ), text


@slow_chaos
def test_machine_that_dies_again_and_again_is_quarantined(machines: Machines) -> None:
    options = [*CHANGES, "train.steps=100000", "elastic.quarantine_failures=3"]
    a, b = (machines.train(name, *options, nodes=NODES, fault=SLOW) for name in "ab")
    until(lambda: last_step(a.folder) >= 3, "step 3")
    for _ in range(3):
        at = len(resumed(a.folder))
        flapping = machines.train("c", *options, nodes=NODES, fault=SLOW)
        until(lambda at=at: started_with(a.folder, 3, at + 1), "a start of three machines", 90)
        machines.kill(flapping)
        until(lambda at=at: started_with(a.folder, 2, at + 2), "a start of two machines", 90)
    ended = machines.train("c", *options, nodes=NODES).wait(60)
    assert ended.code == ExitCode.QUARANTINED
    assert "c is quarantined: its agent died 3 times" in ended.err
    until(lambda: events(a.folder, "quarantined"), "word of it in the run's events", 10)
    (quarantined,) = events(a.folder, "quarantined")
    assert (quarantined["host"], quarantined["deaths"]) == ("c", 3)
    step = last_step(a.folder)
    until(lambda: last_step(a.folder) > step + 3, "more steps")
    for training in (a, b):
        training.launcher.send_signal(signal.SIGTERM)
    for training in (a, b):
        ended = training.wait()
        assert ended.code == ExitCode.PREEMPTED, ended.err
        assert "c is quarantined" in ended.err


def rendezvous(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwright", "rendezvous", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_store_listens_where_it_is_told_and_refuses_strangers(settings: list[str], tmp_path: Path) -> None:
    store = rendezvous("--listen", "127.0.0.1:0", "--run-id", "mine")
    try:
        assert store.stdout is not None
        endpoint = store.stdout.readline().split("--rendezvous ")[1].split()[0]
        shown = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
        mine = [line.split()[3] for line in shown.splitlines() if f"pid={store.pid}," in line]
        assert mine == [endpoint]
        taken = rendezvous("--listen", endpoint)
        _, errors = taken.communicate(timeout=60)
        assert taken.returncode == ExitCode.BAD_INPUT
        assert f"cannot listen on {endpoint}: Address already in use" in errors
        ended = start(tmp_path, settings, "--rendezvous", endpoint, "--nodes", "1", "--run-id", "other", nproc=1).wait()
        assert ended.code == ExitCode.PARTITIONED
        assert f"the store at {endpoint} serves the run 'mine', not 'other'" in ended.err
    finally:
        store.kill()
        store.communicate()
    wild = rendezvous("--listen", "0.0.0.0:0")
    _, errors = wild.communicate(timeout=60)
    assert wild.returncode == ExitCode.BAD_INPUT
    assert "every network of this machine" in errors
