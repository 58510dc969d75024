"""Real trainings for tests of faults: start one, wait for a step, break it, compare it with one that nobody disturbed.

A run is the command line in processes of its own, so that a fault hits what a user would have running:

    def test_...(settings, tmp_path, undisturbed):
        training = start(tmp_path, settings, fault="rank=1,step=7,phase=forward,kind=sigkill")
        assert training.wait().code == ExitCode.DONE
        assert_same_run(training.folder, undisturbed)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from meshwright.faults import NOTES, VARIABLE

STEPS = 20
EVERY = 5
SETTINGS = (
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    # Saved when the step is over, so that a test knows what a fault finds.
    "checkpoint.background=false",
    "train.deterministic=true",
    "observe.log_every=1",
)
"""Twenty steps with a checkpoint every five."""


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    code: int
    out: str
    err: str


class Training:
    """A training that was started: its run folder, its processes and how it ends."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.started = time.time()

    @property
    def launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run now, by rank; a rank has the variable RANK."""
        return ranks_below(self.process.pid)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Return as soon as it holds; the training must not end before."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                out, err = (text or "" for text in self.process.communicate())
                raise AssertionError(
                    f"ended with {self.process.returncode} before {what}\n{out[-2000:]}\n{err[-4000:]}"
                )
            assert time.monotonic() < deadline, f"no {what} in {timeout:g} s"
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout: float = 60) -> None:
        """Return as soon as that step is recorded."""
        self.wait_for(lambda: last_step(self.folder) >= step, f"step {step}", timeout)

    def wait_for_event(self, kind: str, count: int = 1, timeout: float = 60) -> None:
        """Return as soon as events.jsonl has that many lines of a kind."""
        self.wait_for(lambda: len(events(self.folder, kind)) >= count, f"{count} x {kind}", timeout)

    def wait(self, timeout: float = 120) -> Ended:
        """How it ends; all its processes must be gone then."""
        family = self.launcher.children(recursive=True) if self.process.poll() is None else []
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        _, left = psutil.wait_procs(family, timeout=10)
        left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"
        return Ended(self.process.returncode, out, err)

    def end(self) -> None:
        """Kill whatever is left of it; for tests that failed."""
        if self.process.poll() is None:
            family = self.launcher.children(recursive=True)
            for process in [self.launcher, *family]:
                if process.is_running():
                    process.kill()
        self.process.communicate()


def start(
    folder: Path,
    settings: Sequence[str],
    *options: str,
    nproc: int | None = 2,
    fault: str = "",
    name: str = "run",
    under: Sequence[str] = (),
    session: bool = False,
    output: TextIO | None = None,
    **variables: str,
) -> Training:
    """Start `meshwright train` in a folder; `fault` is a value of MESHWRIGHT_FAULT, `under` a command before it.

    What it prints is kept for `wait`; one that prints much for long needs an `output` of its own.
    """
    ranks = [] if nproc is None else ["--nproc", str(nproc)]
    command = [*under, sys.executable, "-m", "meshwright", "train", *settings, *SETTINGS, f"run.dir={name}", *ranks]
    environment = {**environment_of(fault, folder / name), "PYTHONFAULTHANDLER": "1", **variables}
    process = subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=output or subprocess.PIPE,
        text=True,
        start_new_session=session,
    )
    return Training(process, folder / name)


def environment_of(fault: str, folder: Path) -> dict[str, str]:
    """Variables of a training in a run folder.

    Over which interface its ranks talk is theirs to find out: tests that ran ranks in this process have set it here.
    """
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return {**kept, VARIABLE: fault, NOTES: str(_notes(folder))}


def _notes(folder: Path) -> Path:
    """Where the faults of a run are noted."""
    return folder.with_name(f"{folder.name}-faults.jsonl")


def fault_time(folder: Path, kind: str) -> float:
    """When a fault of a kind first played in a run."""
    return float(next(line["time"] for line in lines(_notes(folder)) if line["kind"].startswith(kind)))


def ranks_below(pid: int) -> dict[int, psutil.Process]:
    """The ranks among the descendants of a process, by rank."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            # What a rank writes to its environment after a fork is not seen from outside: its title is.
            number = re.search(r"rank (\d+)", child.name()) if child.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            continue
        if number:
            found[int(number[1])] = child
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; one that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "metrics.jsonl")


def last_step(folder: Path) -> int:
    return max((line["step"] for line in metrics(folder)), default=0)


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of events.jsonl, or those of one kind."""
    return [line for line in lines(folder / "events.jsonl") if kind in (None, line["event"])]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the committed checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*[0-9]"))


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every line, in the order of the file."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(folder)]


def weights(folder: Path) -> str:
    """A digest of the weights in the newest checkpoint."""
    from meshwright import load_model

    digest = hashlib.sha256()
    for name, tensor in sorted(load_model(folder).state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    """Every step is recorded once, with the same loss and gradient norm, and ends in the same weights, bit for bit."""
    assert [step for step, _, _ in losses(folder)] == [step for step, _, _ in losses(undisturbed)]
    assert losses(folder) == losses(undisturbed)
    assert weights(folder) == weights(undisturbed)


def assert_near_run(folder: Path, undisturbed: Path, bound: float = 1e-9) -> None:
    """As `assert_same_run` where the split has changed on the way: sums took another order."""
    assert [step for step, _, _ in losses(folder)] == [step for step, _, _ in losses(undisturbed)]
    for (step, *found), (_, *expected) in zip(losses(folder), losses(undisturbed), strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert abs(mine - other) <= bound * max(1.0, abs(other)), f"step {step}: {mine} and {other}"


def report(case: str, folder: Path, note: str = "") -> None:
    """Print what each failure of a run's ranks cost, as the run's events have it."""
    failed, restarted = events(folder, "failed"), events(folder, "restarted")
    assert failed, "nothing failed"
    for failure in failed:
        later = [event["generation"] for event in failed if event["generation"] > failure["generation"]]
        until = min(later, default=float("inf"))
        found = [event for event in restarted if failure["generation"] < event["generation"] <= until]
        if found:
            print_cost(case, failure["detect_s"], found[0]["restart_s"], found[0]["steps_lost"], note)
        else:
            print_cost(case, failure["detect_s"], None, None, "failed again" if later else "not started again")


def print_cost(case: str, detect_s: float | None, restart_s: float | None, lost: int | None, note: str = "") -> None:
    """What a fault cost, the same line for every case: seconds until it was detected, from then to the first new step,
    steps done again. None is what a case does not have."""
    words = [
        case,
        f"detect {_seconds(detect_s)}",
        f"restart {_seconds(restart_s)}",
        f"steps lost {'-' if lost is None else lost}",
    ]
    print(" | ".join([*words, *([note] if note else [])]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def wait_until_gone(processes: Iterable[psutil.Process], timeout: float) -> float:
    """Seconds until all of them have ended; fails when they do not."""
    began = time.monotonic()
    waiting = list(processes)
    while waiting:
        waiting = [p for p in waiting if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert time.monotonic() - began < timeout, f"still there after {timeout:g} s: {waiting}"
        time.sleep(0.02)
    return time.monotonic() - began


def kill(process: psutil.Process, number: signal.Signals = signal.SIGKILL) -> None:
    process.send_signal(number)
