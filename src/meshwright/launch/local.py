"""Start n ranks on this machine and look after them.

The parent imports everything once and forks where that is safe, so that eight ranks start in about the time of one;
elsewhere ranks are fresh interpreters. It forwards stop signals, ends all ranks as soon as one fails, and shows that
rank's own error first. Ranks talk over the loopback interface and meet through a file, so that nothing listens on the
network.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.parallel.torch_releases import FileStore
from meshwright.parallel.world import World, available_cores, join_world
from meshwright.training.hooks import STOP_SIGNALS, show_cursor

GRACE_S = 10.0
"""How long ranks may take to end by themselves after one of them has failed."""


class RankError(RuntimeError):
    """A rank failed; the message has its number and its own traceback."""


def run_ranks(work: Callable[[World], None], count: int, *, device: str = "auto", timeout_s: float = 600.0) -> None:
    """Run `work` on that many ranks of this machine; raises what the first failing rank raised."""
    if count == 1:
        with join_world(device, timeout_s) as world:
            work(world)
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")
    context: Any = multiprocessing.get_context("fork" if may_fork(device) else "spawn")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as meeting_place, _Supervisor(meeting_place) as supervisor:
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            store = str(Path(meeting_place) / "store")
            process = context.Process(target=_rank, args=(work, rank, count, device, timeout_s, store, sender))
            process.start()
            sender.close()
            supervisor.add(process, receiver)
        supervisor.watch()


def may_fork(device: str) -> bool:
    """Whether forked ranks would work: threads and a CUDA in use do not survive a fork, nor does macOS take it well."""
    if sys.platform != "linux" or (device != "cpu" and torch.cuda.device_count() > 0):
        return False
    return len(os.listdir("/proc/self/task")) == 1


class _Supervisor:
    """Looks after ranks from the first one started: passes signals on, ends them all, finds the first cause."""

    def __init__(self, meeting_place: str) -> None:
        self.meeting_place = meeting_place
        self.ranks: list[BaseProcess] = []
        self.reports: list[Connection] = []
        self.signals = 0
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Supervisor:
        with suppress(ValueError):  # Only a main thread may; a caller in another thread passes no signals on.
            self.previous = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
            self.previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def add(self, process: BaseProcess, report: Connection) -> None:
        """Take a rank that was just started into care."""
        self.ranks.append(process)
        self.reports.append(report)

    def watch(self) -> None:
        """Return when all ranks have succeeded; raise what the first failing one raised."""
        self._wait_for_first_failure()
        self._raise_cause(self._end_rest())

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            for process in self.ranks:
                process.kill()
            show_cursor()
            shutil.rmtree(self.meeting_place, ignore_errors=True)
            os._exit(128 + number)
        self._send(number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the ranks, which the terminal does not reach, stop and go on with the parent."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for process in self.ranks:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _wait_for_first_failure(self) -> None:
        running = self.ranks
        while running and not any(process.exitcode for process in self.ranks):
            wait([process.sentinel for process in running])
            running = [process for process in running if process.is_alive()]

    def _end_rest(self) -> dict[int, signal.Signals]:
        """End the ranks that do not end by themselves; gives those that a signal from elsewhere ended."""
        deadline = time.monotonic() + GRACE_S
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = {rank: process.exitcode for rank, process in enumerate(self.ranks)}
        for process in self.ranks:
            if process.is_alive():
                process.kill()
                process.join()
        return {rank: signal.Signals(-code) for rank, code in codes.items() if code is not None and code < 0}

    def _raise_cause(self, died: dict[int, signal.Signals]) -> None:
        """Raise the first cause: a rank's own error, else a rank that was killed, else a lost connection."""
        failures = []
        for rank, receiver in enumerate(self.reports):
            with suppress(EOFError):
                if receiver.poll():
                    failures.append({"rank": rank, **json.loads(receiver.recv_bytes())})
        # A rank that was killed cannot speak, and the lost connections that the others report are its consequence.
        causes = [failure for failure in failures if not failure["lost_connection"]]
        if died and not causes:
            rank, number = next(iter(died.items()))
            hint = "; the machine may have run out of memory" if number == signal.SIGKILL else ""
            raise RankError(f"rank {rank} of {len(self.ranks)} was ended by {number.name}{hint}")
        if failures:
            first = min(causes or failures, key=lambda failure: failure["time"])
            if first["code"] is not None:
                error = UserError(first["text"])
                error.exit_code = first["code"]
                raise error
            raise RankError(f"rank {first['rank']} of {len(self.ranks)} failed:\n{first['text']}")
        if any(process.exitcode for process in self.ranks):
            codes = ", ".join(f"rank {rank}: {process.exitcode}" for rank, process in enumerate(self.ranks))
            raise RankError(f"ranks ended without a word; exit codes {codes}")


def _rank(
    work: Callable[[World], None], rank: int, size: int, device: str, timeout_s: float, store: str, report: Connection
) -> None:
    """The life of one rank."""
    # A group of its own: Ctrl-C in the terminal reaches the parent alone, which passes it on once.
    os.setpgrp()
    threading.Thread(target=_die_with_parent, args=(os.getppid(), Path(store).parent), daemon=True).start()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // size))
    code = 0
    try:
        with join_world(device, timeout_s, (rank, size, rank), FileStore(store, size)) as world:
            try:
                work(world)
            except BaseException as error:
                # Told while the group still stands: its end makes the other ranks fail too, and they must be later.
                code = _tell(report, error)
    except BaseException as error:
        code = code or _tell(report, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a backend whose peer is gone may not end.
    os._exit(code)


def _tell(report: Connection, error: BaseException) -> int:
    """Tell the parent what went wrong; gives the exit code."""
    code, text = None, "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        code, text = error.exit_code, str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, text = 130, "interrupted before the first step"
    lost = any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "DistBackendError"))
    # The parent reads when the ranks have ended: more than a pipe holds would keep this one from ending.
    message = {"time": time.time(), "code": code, "lost_connection": lost, "text": text[-8_000:]}
    report.send_bytes(json.dumps(message).encode())
    return 1 if code is None else code


def _die_with_parent(parent: int, meeting_place: Path) -> None:
    """A rank whose parent was killed has nobody to report to, and must not train on alone nor leave files behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(meeting_place, ignore_errors=True)
    os._exit(1)
