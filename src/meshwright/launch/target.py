"""What every place that a run can be launched on has: files for review, submission, state, logs, an end. No torch.

A target is a module of this package with `describe(group)`, which adds its options, and `TARGET`. What was submitted
lies in a folder beside the run's, RUN.launch, with launch.json, so that `status`, `logs` and `stop` need nothing but
the run folder's name. It is not inside: a run folder can be set aside, and may be on disks that only the machines see.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ValidationError

from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.launch.submission import Submission

State = Literal["waiting", "running", "finished", "failed", "stopped", "lost"]
RECORD = "launch.json"


@dataclass(frozen=True)
class Status:
    """How a launched run is doing, by what its scheduler says."""

    state: State
    detail: str = ""
    """The scheduler's own words, and the object to look at."""


class OfEvery(BaseModel):
    """What is kept of every launch."""

    target: str
    name: str
    ranks: int | None = None
    rank_logs: str | None = None


class OfProcess(BaseModel):
    """What is kept of a process of this machine."""

    folder: str
    pid: int


class Target(Protocol):
    """A place that runs are launched on."""

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """Refuse what can be known to fail: a host that does not answer, a namespace that does not exist."""

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """Exactly what is submitted, by file name."""

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Submit what lies in that folder; gives what `status`, `logs` and `stop` need to find it again."""

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """What its record has beside the name of the run and the target."""

    def status(self, record: Mapping[str, Any]) -> Status:
        """How it is doing."""

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Lines of its processes; with `follow` until it ends."""

    def stop(self, record: Mapping[str, Any]) -> str:
        """Ask it to save and end; gives what was done."""


def write_files(folder: Path, files: Mapping[str, str], asked: str | None = None) -> None:
    """Write what is submitted, in a folder that an option has asked for or beside the run's; scripts can be run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(0o755)
    except OSError as error:
        if asked is not None:
            raise UserError(f"{asked} is to be a folder, and cannot be written: {error.strerror}") from None
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> UserError:
    """What to tell where the folder beside the run's cannot be."""
    return UserError(
        f"{folder} cannot be written: {error.strerror}; what is submitted is kept there, also of a run.dir that "
        "only the machines see: a relative run.dir is one on both sides"
    )


def launch_folder(run: Path) -> Path:
    """Where what was submitted for a run folder lies."""
    whole = run.resolve()
    return whole.with_name(f"{whole.name}.launch")


def write_record(folder: Path, target: str, submission: Submission, found: Mapping[str, Any]) -> None:
    """Keep what was launched."""
    ranks = submission.machines.world
    about = {"target": target, "name": submission.name, "submitted": time.time(), "ranks": ranks}
    write_atomically(folder / RECORD, json.dumps({**about, **found}, indent=1) + "\n")


def read_record(run: Path) -> dict[str, Any]:
    """What was launched for a run folder."""
    file = launch_folder(run) / RECORD
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no `meshwright launch` has started a run in {run} from here: there is no {file}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    check_record(run, found, OfEvery)
    return dict(found)


def check_record(run: Path, found: object, kept: type[BaseModel]) -> None:
    """Raise unless a run folder's record has what was kept there."""
    try:
        kept.model_validate(found)
    except ValidationError as errors:
        wrong = ", ".join(dict.fromkeys(".".join(map(str, error["loc"])) for error in errors.errors()))
        raise UserError(
            f"{launch_folder(run) / RECORD} is not what `meshwright launch` writes: {wrong or 'all of it'} is missing "
            "or wrong; the scheduler's own commands find the run, and without that file it can be launched again"
        ) from None


def rank_file(record: Mapping[str, Any], rank: int, expected: bool) -> Path:
    """Where a rank's own lines are; with `expected` they may be still to come."""
    if "rank_logs" not in record:
        raise UserError(f"on {record['target']} ranks have no files of their own; drop --rank: all lines are there")
    if not 0 <= rank < record.get("ranks", rank + 1):
        last = f", the last is {record['ranks'] - 1}" if "ranks" in record else ""
        raise UserError(f"--rank {rank}: the first rank of {record['name']} is 0{last}")
    file = Path(f"{record['rank_logs']}{rank}.log")
    if not expected and not file.exists():
        raise UserError(f"there is no {file}: rank {rank} has not started, or only its machine sees that folder")
    return file
