"""The lock of a run folder: one training at a time writes there, and a generation that was replaced writes no more.

The operating system's lock keeps other trainings out while any process that inherited it lives. What the file says,
its fence, tells who holds it; a process that was taken for dead and wakes up finds another name there.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.errors import CheckpointError, ExitCode

WAIT_S = 15.0
"""How long a start waits for the ranks of a launcher that was killed to end."""
OWN_WAIT_S = 3.0
"""How long a generation waits for an earlier one of the same launch, on a machine that was lost, to end."""

CLOCK_SLACK_S = 60.0
"""By how much clocks may have been set between two looks at them."""


class LockedError(CheckpointError):
    """Another process trains in the run folder."""

    exit_code = ExitCode.LOCKED


@dataclass(frozen=True)
class Fence:
    """Who may write to a run folder: what its lock file says. A rank whose generation is over finds another there."""

    launch: str
    """A name of this launch that no other has."""
    generation: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (generation {self.generation})"


class Lock:
    """A lock that is held; closing it, or the end of every process that has it, lets it go."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def fileno(self) -> int:
        """The descriptor that holds it."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def is_current(self) -> bool:
        """Whether it is still the file that others look at."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def write(self, fence: Fence) -> None:
        """Say who holds it."""
        # Padded, so that one write replaces what was there.
        os.pwrite(self.fileno(), json.dumps(asdict(fence)).ljust(512).encode() + b"\n", 0)

    def close(self) -> None:
        """Let it go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_holder(path: Path) -> Fence | None:
    """Who holds a lock, or held it last; None when that cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Fence(**json.loads(path.read_text()))
    return None


def take_lock(path: Path, fence: Fence) -> Lock:
    """The lock, once it is free; waits for a holder whose launcher is gone, and for an earlier generation of ours."""
    began = time.monotonic()
    told = False
    while True:
        lock = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.is_current:
                return lock
        except BlockingIOError:
            holder = read_holder(path)
            waited = time.monotonic() - began
            if holder is not None and holder.launch == fence.launch and waited > OWN_WAIT_S:
                # It does not end, perhaps on a machine that nobody reaches: it is fenced off instead.
                lock.close()
                return _replace(path)
            if waited > WAIT_S or not _may_be_gone(holder, fence):
                lock.close()
                raise LockedError(
                    f"another process is training in {path.parent}: {holder or 'it does not say which'}; "
                    "wait for it or choose another run.dir"
                ) from None
            if not told:
                who = holder or "another process"
                print(f"meshwright: waiting for the end of {who} in {path.parent}", file=sys.stderr, flush=True)
                told = True
        lock.close()
        time.sleep(0.1)


def _replace(path: Path) -> Lock:
    """A new lock file in the place of one that somebody holds."""
    fresh = path.with_name(f"{path.name}-{os.urandom(4).hex()}")
    lock = Lock(path, os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(path)
    return lock


def _may_be_gone(holder: Fence | None, mine: Fence) -> bool:
    """Whether waiting makes sense: the holder's launcher is not seen to live, or it is an earlier one of ours."""
    if holder is None or holder.launch == mine.launch or holder.host != mine.host:
        return True
    return not is_alive(holder.pid)


def is_alive(pid: int, at: float | None = None) -> bool:
    """Whether a process of this machine runs; one that has ended and that nobody has asked after yet does not.

    With `at`, a unix time, the one that ran then: numbers of processes come again.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    with suppress(OSError, ValueError, IndexError):
        facts = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if facts[0] == "Z":
            return False
        if at is not None:
            return _booted() + int(facts[19]) / os.sysconf("SC_CLK_TCK") <= at + CLOCK_SLACK_S
    return True


def _booted() -> float:
    """Unix time at which this machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        return next(float(line.split()[1]) for line in file if line.startswith("btime"))
