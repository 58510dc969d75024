"""Tests side by side: `pytest --workers 2` runs them in two processes, with one summary and one exit code.

The processes are forked from the one that collected the tests, and none has a second thread: ranks are forked from
them in turn, which a thread would forbid. They take small pieces of the list of tests, the first process from its
front and the second from its back: trainings, which mostly wait, run beside tests that compute. Those in tests/parity
come last and so first from the back, and the first process leaves them alone: threads that other tests leave behind
(pyarrow's, pools of libraries) would be in their way. A test marked `alone` measures time: those run at the end, when
the others have ended.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run tests side by side in that many processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers > 1:
        config.pluginmanager.register(SideBySide(config.option.workers))


PIECE = 8
"""The most tests that are handed out together."""

Piece = list[pytest.Item]


def pieces_of(items: list[pytest.Item]) -> list[Piece]:
    """The tests in their order, in pieces of one file each."""
    pieces: list[Piece] = []
    for item in items:
        if not pieces or len(pieces[-1]) == PIECE or pieces[-1][0].path != item.path:
            pieces.append([])
        pieces[-1].append(item)
    return pieces


@dataclass
class Worker:
    """One of the processes, as the main one sees it."""

    pid: int
    pipe: Connection
    from_the_back: bool
    taken: dict[str, pytest.Item] = field(default_factory=dict)
    running: str = ""
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class SideBySide:
    """The plugin behind `--workers`: hands out the tests, and tells pytest what became of them."""

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        alone = [item for item in session.items if item.get_closest_marker("alone")]
        beside = [item for item in session.items if not item.get_closest_marker("alone")]
        beside.sort(key=forks_ranks)
        # Made here, it is removed with this process's.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._run(session, pieces_of(beside))
        for item, following in zip(alone, [*alone[1:], None], strict=False):
            _stop_if_asked(session)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        _stop_if_asked(session)
        return True

    def _run(self, session: pytest.Session, pieces: list[Piece]) -> None:
        waiting = deque(range(len(pieces)))
        workers = {}
        for number in range(self.count):
            worker = _start(session, pieces, number)
            workers[worker.pipe] = worker
        try:
            while workers:
                for pipe in wait(list(workers)):
                    worker = workers[pipe]  # type: ignore[index]
                    try:
                        kind, content = worker.pipe.recv()
                    except EOFError:
                        _pass_on(session, worker)
                        _fail_what_is_left(session, worker)
                        del workers[worker.pipe]
                        continue
                    if kind == "next":
                        stop = session.shouldfail or session.shouldstop
                        index = None if stop else _next_piece(waiting, pieces, worker.from_the_back)
                        worker.taken |= {} if index is None else {item.nodeid: item for item in pieces[index]}
                        worker.pipe.send(index)
                    elif kind == "done":
                        _pass_on(session, worker)
                    else:
                        worker.running = content["nodeid"] if kind == "pytest_runtest_logstart" else worker.running
                        worker.told.append((kind, content))
        finally:
            for worker in workers.values():
                # A test may take the signal for its own; whoever finds nobody to report to ends as well.
                worker.pipe.close()
                os.kill(worker.pid, signal.SIGINT)
            for worker in workers.values():
                os.waitpid(worker.pid, 0)
        if waiting and not session.shouldfail and not session.shouldstop:
            raise session.Interrupted("no process is left to run the other tests")


def forks_ranks(item: pytest.Item) -> bool:
    """Whether a test forks ranks from its own process."""
    return "parity" in item.path.parts


def _next_piece(waiting: deque[int], pieces: list[Piece], from_the_back: bool) -> int | None:
    """Take the number of a worker's next piece; None where nothing is left for it."""
    if not waiting:
        return None
    if from_the_back:
        return waiting.pop()
    return None if forks_ranks(pieces[waiting[0]][0]) else waiting.popleft()


def _stop_if_asked(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _start(session: pytest.Session, pieces: list[Piece], number: int) -> Worker:
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Worker(pid, ours, from_the_back=number % 2 == 1)
    ours.close()
    code = 1
    try:
        _serve(session, pieces, theirs, number)
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: what the main process does at its end is not this one's to do.
        os._exit(code)


def _pass_on(session: pytest.Session, worker: Worker) -> None:
    """Tell pytest what a worker has told of the piece that it has done: a file's results stand in one line."""
    hooks = session.config.hook
    for kind, content in worker.told:
        if kind == "pytest_runtest_logreport":
            report = hooks.pytest_report_from_serializable(config=session.config, data=content)
            hooks.pytest_runtest_logreport(report=report)
        elif kind == "pytest_warning_recorded":
            hooks.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            getattr(hooks, kind)(**content)
        if kind == "pytest_runtest_logfinish":
            del worker.taken[content["nodeid"]]
    worker.told.clear()


def _fail_what_is_left(session: pytest.Session, worker: Worker) -> None:
    """After a worker has ended: of what it had taken, nothing is passed over."""
    _, status = os.waitpid(worker.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    for name, item in worker.taken.items():
        verb = "ran" if name == worker.running else "should have run"
        cause = f"the process that {verb} this test ended with {code}, in {worker.running or 'no test'}"
        report = pytest.TestReport(name, item.location, {}, "failed", cause, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
    if code and not worker.taken:
        raise session.Interrupted(f"a process that ran tests ended with {code}")


class Messenger:
    """The plugin of a worker: what pytest would show goes to the main process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("pytest_runtest_logreport", content))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        # In types that every process knows.
        category = next(kind for kind in warning_message.category.__mro__ if kind.__module__ == "builtins")
        text = str(warning_message.message)
        plain = warnings.WarningMessage(text, category, warning_message.filename, warning_message.lineno)
        content = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self.pipe.send(("pytest_warning_recorded", content))


def _serve(session: pytest.Session, pieces: list[Piece], pipe: Connection, number: int) -> None:
    """The life of a worker: pieces of tests, until there are no more."""
    # What one test's training shows must not change what another one plans.
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["XDG_CACHE_HOME"], str(number))
    # Output is caught in files, which a fork would share; what is shown outside of tests is shown by the main process.
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    session.config.pluginmanager.register(Messenger(session.config, pipe))

    def following() -> Piece:
        pipe.send(("next", None))
        index = pipe.recv()
        return [] if index is None else pieces[index]

    try:
        piece = following()
        while piece:
            later: Piece = []
            for place, item in enumerate(piece):
                is_last = place + 1 == len(piece)
                # Known before a piece's last test ends: fixtures that the next test shares with it are kept.
                later = following() if is_last else later
                after = (later[0] if later else None) if is_last else piece[place + 1]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            pipe.send(("done", None))
            piece = later
    finally:
        session._setupstate.teardown_exact(None)
