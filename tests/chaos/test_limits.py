"""Limits of the operating system that a run does not fit in: the message names the limit and what to raise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.limits import limit_reached
from tests.chaos.runs import events, print_cost, start


@pytest.mark.slow_chaos
@pytest.mark.parametrize(("files", "code"), [(12, ExitCode.FAILED), (32, ExitCode.NO_PROGRESS)])
def test_too_few_open_files_are_named(files: int, code: int, settings: list[str], tmp_path: Path) -> None:
    # With 12 the launcher cannot start ranks, with 32 it can, and they cannot talk to each other.
    training = start(tmp_path, settings, under=["prlimit", f"--nofile={files}"])
    ended = training.wait()
    assert ended.code == code, ended.err
    words = f"this process may open {files} files and sockets, too few: raise `ulimit -n`"
    assert words in ended.err.splitlines()[0], "the cause comes first"
    assert f"meshwright train: {words}" in ended.err or code != ExitCode.FAILED
    assert all(words in event["cause"] for event in events(training.folder, "failed"))
    print_cost(f"44: {files} open files", None, None, None, "the limit is named")


@pytest.mark.slow_chaos
@pytest.mark.parametrize(("processes", "code"), [(3, ExitCode.FAILED), (6, ExitCode.NO_PROGRESS)])
def test_too_few_processes_are_named(processes: int, code: int, settings: list[str], tmp_path: Path) -> None:
    under = ["prlimit", f"--nproc={processes}"]
    if os.getuid() == 0:
        # The kernel does not hold root to this limit: a user of no other process, who may read and write all files.
        may = "+dac_override"
        under = ["setpriv", "--reuid", "61234", "--clear-groups", f"--inh-caps={may}", f"--ambient-caps={may}", *under]
    training = start(tmp_path, settings, under=under)
    ended = training.wait()
    assert ended.code == code, ended.err
    words = f"no process or thread more may be started: `ulimit -u` is {processes}; raise it"
    assert words in ended.err
    assert all(words in event["cause"] for event in events(training.folder, "failed"))
    print_cost(f"44: {processes} processes and threads", None, None, None, "the limit is named")


def test_other_errors_are_no_limits() -> None:
    assert limit_reached("BlockingIOError: [Errno 11] Resource temporarily unavailable") is None
    assert limit_reached("OSError: [Errno 28] No space left on device") is None
