"""The ranks of one generation on this machine: started, signalled, ended, and what became of them.

The parent imports everything once and forks where that is safe, so that eight ranks start in about the time of one,
and a restart takes a fraction of a second; elsewhere ranks are fresh interpreters.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from meshwright.elastic.failure import (
    LOST_CONNECTION,
    Failure,
    describe_death,
    describe_error,
    first_cause,
    kills_for_memory,
)
from meshwright.elastic.mismatch import explain_abort, explain_disagreement, fatal_stack
from meshwright.elastic.placement import Placement
from meshwright.elastic.rank_log import RankLog
from meshwright.elastic.rank_side import answer_watchers, leave_last_words
from meshwright.errors import ExitCode, UserError
from meshwright.files import write_atomically
from meshwright.limits import limit_reached
from meshwright.parallel.torch_releases import FileStore, PrefixStore, Store, TCPStore, check_collectives
from meshwright.parallel.world import World, available_cores, join_world
from meshwright.pulse import GENERATION, Beat, Pulse, read_pulse
from meshwright.training.hooks import RESIZE_SIGNAL, STOP_SIGNALS

GRACE_S = 10.0
"""How long ranks may take to end by themselves after one of them has failed."""
SETTLE_S = 1.0
"""How long the others may take once the cause is known: one that waits for a lost rank ends in less."""


LEAVING_S = 0.2
"""How long threads may take to be gone that Python no longer knows of."""


class Ending(NamedTuple):
    """How a rank ended that was not cut off by an error."""

    code: int
    reason: str | None = None


Work = Callable[[World], Ending | None]


class StoppedEarly(BaseException):
    """A stop signal came before the first step."""


def may_fork(device: str) -> bool:
    """Whether forked ranks would work: threads and a CUDA in use do not survive a fork, nor does macOS take it well."""
    if sys.platform != "linux" or (device != "cpu" and torch.cuda.device_count() > 0):
        return False
    # A thread that has ended, and was waited for, is there for a moment more.
    deadline = time.monotonic() + LEAVING_S
    while (threads := len(os.listdir("/proc/self/task"))) > threading.active_count() and time.monotonic() < deadline:
        time.sleep(0.005)
    return threads == 1


class Ranks:
    """The ranks of one generation on this machine."""

    def __init__(self, work: Work, placement: Placement, folder: Path, *, device: str, timeout_s: float) -> None:
        """`folder` is private to this launch; ranks leave their pulse there, and `ranks.json` says who they are."""
        self.placement = placement
        self.folder = folder
        self.started = time.monotonic()
        self._kills_for_memory = kills_for_memory()
        self._processes: list[BaseProcess] = []
        self._receivers: list[Connection] = []
        self._reports: dict[int, dict[str, Any]] = {}
        self._noted: list[Failure] = []
        self._work, self._device, self._timeout_s = work, device, timeout_s

    def start(self, run_dir: str | None = None) -> None:
        """Start them all."""
        context: Any = multiprocessing.get_context("fork" if may_fork(self._device) else "spawn")
        for local in range(self.placement.local):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (self._work, self.placement, local, self._device, self._timeout_s, self.folder, sender)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            sender.close()
            self._processes.append(process)
            self._receivers.append(receiver)
        listing = {
            "generation": self.placement.generation,
            "host": self.placement.host,
            "run_dir": run_dir,
            "world": self.placement.world,
            "ranks": {str(self._rank(local)): process.pid for local, process in enumerate(self._processes)},
        }
        write_atomically(self.folder / "ranks.json", json.dumps(listing))

    @property
    def running(self) -> bool:
        """Whether a rank is still there."""
        return any(process.is_alive() for process in self._processes)

    @property
    def failed(self) -> bool:
        """Whether a rank ended other than in peace."""
        return any(process.exitcode not in (None, ExitCode.DONE, ExitCode.PREEMPTED) for process in self._processes)

    def wait(self, others: list[Any], timeout: float) -> None:
        """Return when a rank has ended, another thing is ready, or time is up."""
        ended = [process.sentinel for process in self._processes if process.is_alive()]
        wait([*ended, *others], timeout)

    def send(self, number: int) -> None:
        """A signal to every rank."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """End them at once, also those that are stopped, and wait for it."""
        # Whoever watches them is told first: they are not gone by themselves.
        (self.folder / "ranks.json").unlink(missing_ok=True)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def beat(self, rank: int) -> Beat | None:
        """What a rank of this machine last said."""
        return read_pulse(self.folder / f"{rank}.pulse")

    def beats(self) -> dict[int, Beat]:
        """What the ranks of this machine last said."""
        found = {self._rank(local): self.beat(self._rank(local)) for local in range(len(self._processes))}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def settle(self) -> None:
        """After one has failed: give the others a moment to tell what they know, then end them."""
        deadline = time.monotonic() + GRACE_S
        self._read_reports()
        while self.running and time.monotonic() < deadline:
            self.wait([], min(0.2, max(0.0, deadline - time.monotonic())))
            self._read_reports()
            if self.stopped_early or any(not failure.consequence for failure in self._failures()):
                deadline = min(deadline, time.monotonic() + SETTLE_S)
        self._read_reports()
        # Their deaths by our hand are no cause: what they are is noted before.
        self._noted = self._failures()
        self.kill()

    @property
    def stopped_early(self) -> bool:
        """Whether a rank was asked to stop before its first step; trouble of others, if any, follows from that."""
        self._read_reports()
        asked = any(report.get("early") for report in self._reports.values())
        return asked and all(failure.consequence for failure in self._noted)

    def failure(self) -> Failure:
        """The first cause, once they have settled."""
        if self._noted:
            return first_cause(self._noted)
        codes = ", ".join(f"rank {self._rank(n)}: {p.exitcode}" for n, p in enumerate(self._processes))
        text = f"ranks ended without a word; exit codes {codes}"
        return self.blame(self._rank(0), "ended without a word", text)

    def blame(self, rank: int, cause: str, text: str, **facts: Any) -> Failure:
        """A failure of one of these ranks (-1: of none), with where and when it was."""
        beat = self.beat(rank) if rank >= 0 else None
        beat = beat or max(self.beats().values(), key=lambda beat: beat.entered, default=None)
        since = beat.since if beat is not None else self.started
        return Failure(
            **{
                "rank": rank,
                "world": self.placement.world,
                "host": self.placement.host,
                "cause": cause,
                "text": text,
                "generation": self.placement.generation,
                "step": beat.step if beat is not None else 0,
                "phase": beat.phase if beat is not None else "start",
                "time": time.time(),
                "detect_s": round(max(0.0, time.monotonic() - since), 3),
                **facts,
            }
        )

    def date(self, failure: Failure) -> Failure:
        """A failure that is no rank's, with the step and phase that it found these ranks in, and since when."""
        beat = max(self.beats().values(), key=lambda beat: beat.entered, default=None)
        if beat is None:
            return failure
        since = round(max(0.0, time.monotonic() - beat.since), 3)
        return replace(failure, step=beat.step, phase=beat.phase, detect_s=since)

    def ending(self) -> Ending:
        """How they ended, when none has failed."""
        self._read_reports()
        for local, process in enumerate(self._processes):
            if process.exitcode == ExitCode.PREEMPTED:
                reasons = [report["stopped"] for report in self._reports.values() if report.get("stopped")]
                own = [reason for reason in reasons if reason in _SIGNAL_NAMES]
                return Ending(ExitCode.PREEMPTED, (own or reasons or [f"rank {self._rank(local)} was stopped"])[0])
        return Ending(ExitCode.DONE)

    def _rank(self, local: int) -> int:
        return self.placement.first_rank + local

    def _read_reports(self) -> None:
        for local, receiver in enumerate(self._receivers):
            if local not in self._reports:
                with suppress(EOFError, OSError):
                    if receiver.poll():
                        self._reports[local] = json.loads(receiver.recv_bytes())

    def _failures(self) -> list[Failure]:
        """What is known of ranks that failed by themselves."""
        found = []
        for local, process in enumerate(self._processes):
            rank, report = self._rank(local), self._reports.get(local, {})
            if "text" in report:
                text = describe_error(report, rank, self.placement.world)
                facts = {"code": report["code"], "time": report["time"], "consequence": report["lost_connection"]}
                facts["remedied"] = report["remedied"]
                disagreement = explain_disagreement(report["text"])
                cause = disagreement or report["cause"]
                found.append(self.blame(rank, cause, f"{disagreement}\n{text}" if disagreement else text, **facts))
            elif process.exitcode is not None and process.exitcode < 0:
                memory = kills_for_memory() > self._kills_for_memory
                text = describe_death(rank, self.placement.world, -process.exitcode, memory)
                # An abort may be a rank's answer to a connection that it lost: it is told after real causes.
                aborted = process.exitcode == -signal.SIGABRT
                cause = f"ended by {signal.Signals(-process.exitcode).name}"
                disagreement = explain_abort(self.folder, {rank: signal.SIGABRT}) if aborted else None
                if disagreement:
                    cause += " inside a collective"
                    text = f"{disagreement}: the ranks start again with every collective checked"
                text += fatal_stack(self.folder / f"{rank}.fatal")
                facts = {"consequence": aborted and not disagreement, "check": bool(disagreement)}
                found.append(self.blame(rank, cause, text, **facts))
            elif process.exitcode not in (None, ExitCode.DONE, ExitCode.PREEMPTED):
                cause = f"ended with exit code {process.exitcode}"
                text = f"rank {rank} of {self.placement.world} {cause}, without a word"
                found.append(self.blame(rank, cause, text))
        return found


_SIGNAL_NAMES = {number.name for number in STOP_SIGNALS}


def _rank(
    work: Work,
    placement: Placement,
    local: int,
    device: str,
    timeout_s: float,
    folder: Path,
    report: Connection,
) -> None:
    """The life of one rank."""
    rank, size = placement.first_rank + local, placement.world
    end_with_parent(f"mw rank {rank}")
    # A group of its own: Ctrl-C in the terminal reaches the parent alone, which passes it on once.
    os.setpgrp()
    for number in (*STOP_SIGNALS, RESIZE_SIGNAL):
        signal.signal(number, _stop_early)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    log = RankLog(rank)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(placement.local),
        GENERATION: str(placement.generation),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // placement.local))
    code = 0
    try:
        # The parent holds them back until every rank can take them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        pulse = Pulse(rank, folder / f"{rank}.pulse")
        pulse.enter("start")
        answer_watchers(folder, rank)
        if placement.check:
            check_collectives()
        store = _store(placement, folder, timeout_s) if size > 1 else None
        with join_world(device, timeout_s, (rank, size, local), store, pulse, placement.fence) as world:
            try:
                ending = work(world) or Ending(ExitCode.DONE)
                code = ending.code
                if code:
                    _send(report, {"stopped": ending.reason or "asked to"})
            except BaseException as error:
                # Told while the group still stands: its end makes the other ranks fail too, and they must be later.
                leave_last_words(folder, rank)
                code = _tell(report, error)
    except BaseException as error:
        code = code or _tell(report, error)
    sys.stdout.flush()
    sys.stderr.flush()
    log.close()
    # Not sys.exit: threads of a backend whose peer is gone may not end.
    os._exit(code)


def _store(placement: Placement, folder: Path, timeout_s: float) -> Store:
    """Where the ranks of this generation meet: nothing of an earlier one is left there."""
    if placement.store is None:
        return FileStore(str(folder / f"store-{placement.generation}"), placement.world)
    host, port, prefix = placement.store
    shared = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(prefix, shared)


def _stop_early(number: int, frame: FrameType | None) -> None:
    raise StoppedEarly(signal.Signals(number).name)


def _tell(report: Connection, error: BaseException) -> int:
    """Tell the parent what went wrong; gives the exit code."""
    if isinstance(error, StoppedEarly):
        _send(report, {"stopped": str(error), "early": True})
        return ExitCode.PREEMPTED
    code, text = None, "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        code, text = error.exit_code, str(error)
    cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    lost = any(sign in text for sign in LOST_CONNECTION)
    if lost and code is None:
        cause = "lost the connection to another rank"
    if code is None and (limit := limit_reached(text)) is not None:
        cause, text = limit, f"{text}{limit}\n"
    # The parent may read when the ranks have ended: more than a pipe holds would keep this one from ending.
    message = {"time": time.time(), "code": code, "cause": cause, "lost_connection": lost, "text": text[-8_000:]}
    message["remedied"] = getattr(error, "remedied", False)
    _send(report, message)
    return 1 if code is None else code


def _send(report: Connection, message: dict[str, Any]) -> None:
    with suppress(OSError):  # A parent that is gone ends this rank in another way.
        report.send_bytes(json.dumps(message).encode())


def end_with_parent(name: str | None = None) -> None:
    """This process, a child, ends when its parent does, however that ends; it must not train on alone."""
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if name is not None:
            libc.prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME: what ps and top show
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the kernel's own word, GIL or no GIL
        if os.getppid() != parent:
            os._exit(1)
    # Where there is no such word; and for a child that a process in between has started.
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
