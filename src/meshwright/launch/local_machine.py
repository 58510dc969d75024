"""This machine as a target: the run goes on in the background when the terminal is closed. No torch."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshwright.data.sources import SourceOptions, list_files
from meshwright.elastic.rank_log import RANK_LOGS
from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.launch import detached
from meshwright.launch.lines import lines_of
from meshwright.launch.submission import RUN_FILE, Submission
from meshwright.launch.target import OfProcess, Status
from meshwright.torch_support import require_torch
from meshwright.training.job import make_job, unprepared
from meshwright.training.run_folder import RunFolder

NAME = "training"
SCRIPT = f"{NAME}.sh"
_SCRIPT = f"""\
#!/bin/sh
folder=$(cd "$(dirname "$0")" && pwd)
export {RANK_LOGS}="$folder/{NAME}-rank"
cd {{cwd}} && exec {{command}} "$folder/{RUN_FILE}" {{rest}}
"""


def describe(group: argparse._ArgumentGroup) -> None:
    """It has no options of its own."""


class LocalMachine:
    """Processes of this machine."""

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """Check what `meshwright train` checks before it starts ranks: the files are here."""
        require_torch()
        config, before = submission.config, dict(os.environ)
        os.environ.update(submission.environment)
        try:
            if unprepared(config.data) is None:
                make_job(config, submission.machines.world)
            else:
                # Packed by the run itself, which may take long; where from can be looked at.
                RunFolder(config.run.dir).check(config)
                list_files(config.data.sources, SourceOptions())
        finally:
            os.environ.clear()
            os.environ.update(before)

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """The run file, the plan and the command."""
        if submission.machines.most > 1:
            raise ConfigError("--on local is this machine alone; drop --nodes, or take --on hosts, slurm or kubernetes")
        given = [f"{name}={value}" for name, value in submission.environment.items()]
        train = [sys.executable, "-m", "meshwright", "train"]
        command = shlex.join(["env", *given, *train] if given else train)
        rest = shlex.join(submission.train("")[1:])
        return {**submission.files(), SCRIPT: _SCRIPT.format(cwd=shlex.quote(os.getcwd()), command=command, rest=rest)}

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Start it in a session of its own."""
        facts = detached.start(folder, NAME, ["sh", str(folder.resolve() / SCRIPT)])
        where = str(folder.resolve())
        return {"folder": where, "pid": facts["pid"], "rank_logs": f"{where}/{NAME}-rank"}

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """Its process."""
        return OfProcess

    def status(self, record: Mapping[str, Any]) -> Status:
        """What its process says."""
        return status_of(*detached.state(Path(record["folder"]), NAME), f"process {record['pid']}")

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Its output."""
        folder = Path(record["folder"])
        return lines_of([folder / f"{NAME}.log"], lambda: follow and detached.state(folder, NAME)[0] == "running")

    def stop(self, record: Mapping[str, Any]) -> str:
        """SIGTERM: it saves and ends."""
        if not detached.send(Path(record["folder"]), NAME, signal.SIGTERM):
            raise UserError(f"process {record['pid']} is not there any more")
        return f"asked process {record['pid']} to save and end"


def status_of(state: str, code: int | None, who: str) -> Status:
    """A process's state in the words of all targets."""
    match state, code:
        case "running", _:
            return Status("running", who)
        case "ended", ExitCode.DONE:
            return Status("finished", who)
        case "ended", ExitCode.PREEMPTED:
            return Status("stopped", f"{who} saved and ended; launch it again to go on")
        case "ended", _:
            return Status("failed", f"{who} ended with {code}; `meshwright launch logs` shows why")
    return Status("lost", f"{who} is gone without a word; launch it again to go on from its last checkpoint")


TARGET = LocalMachine()
