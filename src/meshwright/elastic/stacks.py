"""The Python stacks of a process, taken from outside: by py-spy where it is installed, else by the rank's own signal.

py-spy reads the memory of a process without stopping it, so it works on ranks that are stopped or hold the GIL. The
signal makes the rank's faulthandler write its stacks; a stopped process does not answer it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.elastic.processes import catches, process_state
from meshwright.elastic.rank_side import STACK_SIGNAL

MOST_FRAMES = 40


@dataclass(frozen=True)
class Frame:
    """A place in the code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stacks:
    """What a process is doing."""

    main: tuple[Frame, ...] = ()
    """The frames of its main thread, the innermost first."""
    others: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    """Its other threads."""
    holds_gil: bool | None = None
    """Whether the main thread holds the GIL; None where that is not known."""
    source: str = ""
    problem: str = ""
    """Why there are none."""

    @property
    def place(self) -> Frame | None:
        """The innermost frame of code that is not torch's or Python's own: where a person would look."""
        own = (frame for frame in self.main if not _is_library(frame.file))
        return next(own, self.main[0] if self.main else None)

    @property
    def collective(self) -> str:
        """The function of torch.distributed that the main thread waits in; empty when it is somewhere else."""
        near = [frame for frame in self.main[:4] if frame.file.endswith("torch/distributed/distributed_c10d.py")]
        return near[-1].function.split(".")[-1] if near else ""


def take_stacks(pid: int, folder: Path, rank: int, timeout_s: float = 5.0) -> Stacks:
    """The stacks of a rank, now."""
    spy = _py_spy()
    problem = "py-spy is not installed (pip install 'meshwright[spy]')"
    if spy is not None:
        found = _by_py_spy(spy, pid, timeout_s)
        if found.main:
            return found
        problem = found.problem
    found = _by_signal(pid, folder / f"{rank}.stacks", timeout_s)
    return found if found.main else Stacks(problem=f"{problem}; {found.problem}")


PY_SPY = "MESHWRIGHT_PY_SPY"
"""The variable that names another py-spy than the one that is installed beside Python; empty for none."""


def _py_spy() -> str | None:
    if PY_SPY in os.environ:
        return os.environ[PY_SPY] or None
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _by_py_spy(spy: str, pid: int, timeout_s: float) -> Stacks:
    command = [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Stacks(problem=f"py-spy: {error}")
    if done.returncode:
        words = done.stderr.strip().splitlines()
        return Stacks(problem=f"py-spy: {words[0] if words else f'exit code {done.returncode}'}")
    main: tuple[Frame, ...] = ()
    others = []
    holds_gil = None
    try:
        threads = json.loads(done.stdout)
    except ValueError:
        return Stacks(problem="py-spy: said something else than JSON")
    for thread in threads:
        frames = tuple(
            Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"][:MOST_FRAMES]
        )
        if thread["os_thread_id"] == pid:
            main, holds_gil = frames, thread["owns_gil"]
        else:
            others.append((thread["thread_name"] or "a thread", frames))
    return Stacks(main, tuple(others), holds_gil, "py-spy")


def _by_signal(pid: int, path: Path, timeout_s: float) -> Stacks:
    if process_state(pid).state in ("T", "t"):
        return Stacks(problem="the process is stopped and does not answer a signal")
    if sys.platform == "linux" and not catches(pid, STACK_SIGNAL):
        return Stacks(problem="the process does not answer the signal for stacks")
    before = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return Stacks(problem=f"signal: {error}")
    deadline = time.monotonic() + timeout_s
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = path.stat().st_size if path.exists() else 0
        # Written in pieces: complete once it grows no more.
        if now > before and now == size:
            with path.open() as file:
                file.seek(before)
                return parse_faulthandler(file.read())
        size = now
    return Stacks(problem=f"no answer to the signal for stacks in {timeout_s:g} s")


_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def parse_faulthandler(text: str) -> Stacks:
    """What faulthandler has written. It names the thread that took the signal "current", which is the main one."""
    threads: list[tuple[str, list[Frame], bool]] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            threads.append((begins[2] or begins[1], [], line.startswith("Current")))
        elif line.startswith("Stack (most recent call first)"):
            threads.append(("main", [], True))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame[1], int(frame[2]), frame[3]))
    # The main thread was there first and is written last; a signal to the process may reach any thread.
    if not threads:
        return Stacks(problem="nothing to read in what faulthandler wrote")
    main = threads.pop()
    others = tuple((name, tuple(frames[:MOST_FRAMES])) for name, frames, _ in threads)
    return Stacks(tuple(main[1][:MOST_FRAMES]), others, None, "faulthandler")


def _short(file: str) -> str:
    """A path without the part that says nothing: from the package on."""
    parts = Path(file).parts
    for mark in ("site-packages", "src"):
        if mark in parts:
            return str(Path(*parts[parts.index(mark) + 1 :]))
    return file


def _is_library(file: str) -> bool:
    if "/site-packages/" in file and "/site-packages/meshwright/" not in file:
        return True
    # That file only calls torch.
    return file.endswith("/meshwright/torch_private.py") or file.startswith(("<", sys.base_prefix))
