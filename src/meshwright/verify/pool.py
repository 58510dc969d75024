"""A pool of ranks that is started once and runs many small pieces of distributed work, each in a group of its own.

Starting ranks takes most of the time of a small proof: they are forked after everything is imported, and every piece
of work takes as many of them as it needs. After a failure the ranks are replaced, and so they are when too many threads
have gathered in them: caches of torch keep some process groups, with their threads, for good.

Collectives can be checked (torch's debug level DETAIL), so that ranks which disagree end in an error that says so and
not in a wait; that takes most of the time of small work. So work runs unchecked first, and work that has failed runs
once more with checks, for a better word on why.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from meshwright.launch.local import RankError, may_fork
from meshwright.parallel.torch_releases import FileStore, check_collectives
from meshwright.parallel.world import join_world

Result = TypeVar("Result")

MOST_THREADS = {"cpu": 60, "cuda": 300}
"""How many threads a rank may have before it is replaced, by where it computes: CUDA has threads of its own, and ranks
that use it are fresh interpreters, which take seconds to replace."""

_SILENT = "ended without a word"
_DONE = "done"
"""How many ranks have ended a piece of work, in the store where they met."""


class RankPool:
    """Ranks on this machine, up to a number, started when they are first needed.

    They compute on its CPU, or with `device` "cuda-shared" on its GPUs, which they share over gloo.
    """

    def __init__(
        self,
        size: int = 8,
        timeout_s: float = 120.0,
        checked: bool = False,
        device: Literal["cpu", "cuda-shared"] = "cpu",
    ) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.checked = checked
        self.device = device
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Callable[..., Result], ranks: int, *inputs: Any) -> list[Result]:
        """What `work(world, *inputs)` gives on each of that many ranks; raises what the first failing one raised."""
        if not 1 <= ranks <= self.size:
            raise ValueError(f"{ranks} ranks in a pool of {self.size}")
        try:
            return self._run(work, ranks, inputs)
        except RankError as error:
            if self.checked or ranks == 1:
                raise
            failed = error
        # Not while the error is handled: forked ranks would tell of it beside their own.
        self._check_and_run(work, ranks, inputs)
        # Ranks that agree, and a result this time: what failed was not a disagreement.
        raise failed

    def _check_and_run(self, work: Callable[..., Any], ranks: int, inputs: tuple[Any, ...]) -> None:
        self.checked = True
        try:
            self._run(work, ranks, inputs)
        finally:
            self.checked = False
            self.close()

    def _run(self, work: Callable[..., Result], ranks: int, inputs: tuple[Any, ...]) -> list[Result]:
        self._start()
        assert self._folder is not None
        self._count += 1
        store = str(Path(self._folder.name) / str(self._count))
        taken = self._ranks[:ranks]
        for rank, (_, pipe) in enumerate(taken):
            # One that is gone is noticed when its answer is read.
            with suppress(OSError):
                pipe.send((work, rank, ranks, store, inputs))
        try:
            results = self._results(taken)
        except BaseException:
            self.close()
            raise
        if max(_threads(process) for process, _ in self._ranks) > MOST_THREADS[self.device.split("-")[0]]:
            self.close()
        return results

    def close(self) -> None:
        """End the ranks."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._ranks:
            return
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        context: Any = multiprocessing.get_context("fork" if may_fork(self.device) else "spawn")
        for number in range(self.size):
            ours, theirs = context.Pipe()
            facts = theirs, os.getpid(), self.timeout_s, self.checked, self.device, self._stacks(number)
            process = context.Process(target=_serve, args=facts, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _stacks(self, number: int) -> Path:
        """Where a rank that a fatal signal ends leaves its stacks."""
        assert self._folder is not None
        return Path(self._folder.name) / f"{number}.fatal"

    def _results(self, taken: list[tuple[BaseProcess, Connection]]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + self.timeout_s
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(taken)}
        while waiting and time.monotonic() < deadline:
            # Once one has failed, the others get a moment to tell their own cause, which may be the first one.
            patience = 1.0 if failures else deadline - time.monotonic()
            ready: list[Any] = wait(list(waiting), timeout=patience)
            if failures and not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    done, when, value = pipe.recv()
                except (EOFError, OSError):
                    end = _end(taken[rank][0])
                    done, when, value = False, time.time(), f"{_SILENT}: {end}\n{_read(self._stacks(rank))}"
                if done:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
        if failures:
            (_, rank, text), *others = sorted(failures)
            # Others notice one that is gone before this process does.
            silent = "".join(f"\nrank {other} {said}" for _, other, said in others if said.startswith(_SILENT))
            raise RankError(f"rank {rank} of {len(taken)} failed:\n{text}{silent}")
        if waiting:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(taken)} gave no result in {self.timeout_s:g} s")
        return [results[rank] for rank in range(len(taken))]


def _end(process: BaseProcess) -> str:
    """How a process ended that has closed its pipe."""
    process.join(5.0)
    code = process.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _read(stacks: Path) -> str:
    """What a rank has left there, if anything."""
    return stacks.read_text(errors="replace") if stacks.exists() else ""


def _threads(process: BaseProcess) -> int:
    tasks = Path(f"/proc/{process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _wait_for_others(meeting: FileStore | None, size: int) -> None:
    """Stay until all are done, or for a moment: one that leaves while another still connects to it ends that one."""
    if meeting is None:
        return
    done, until = meeting.add(_DONE, 1), time.monotonic() + 5.0
    while done < size and time.monotonic() < until:
        time.sleep(0.001)
        done = meeting.add(_DONE, 0)


def _serve(pipe: Connection, parent: int, timeout_s: float, checked: bool, device: str, stacks: Path) -> None:
    """The life of a rank: work, answer, wait for more."""
    # Opened once and kept: a signal handler cannot open any.
    faulthandler.enable(stacks.open("w"))
    # Ctrl-C is the parent's to answer: it ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if checked:
        check_collectives()
    # What was imported before the fork is never collected: looking through it took more time than most work does.
    gc.freeze()
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                os._exit(1)
        try:
            work, rank, size, store, inputs = pipe.recv()
        except EOFError:
            os._exit(0)
        meeting = FileStore(store, size) if size > 1 else None
        try:
            with join_world(device, timeout_s, (rank, size, rank), meeting) as world:
                answer = (True, time.time(), work(world, *inputs))
                _wait_for_others(meeting, size)
        except BaseException as error:
            answer = (False, time.time(), "".join(traceback.format_exception(error)))
            if meeting is not None:
                meeting.add(_DONE, 1)
        pipe.send(answer)
        # Models and groups hold each other; what the next piece of work finds should not depend on the last one.
        gc.collect()
        if device != "cpu":
            # Others may need what this rank's allocator keeps.
            torch.cuda.empty_cache()
