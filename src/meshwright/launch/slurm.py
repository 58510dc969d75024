"""Slurm as a target: a script for sbatch, its job, and what it left when Slurm has forgotten it. No torch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.launch import slurm_words as words
from meshwright.launch.lines import lines_of
from meshwright.launch.slurm_script import GRACE_S, script_of
from meshwright.launch.submission import Submission
from meshwright.launch.target import State, Status, launch_folder

SCRIPT = "job.sh"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


def describe(group: argparse._ArgumentGroup) -> None:
    """Options of Slurm."""
    group.add_argument("--partition", metavar="NAME", help="of the machines")
    group.add_argument("--account", metavar="NAME", help="who pays")
    group.add_argument("--qos", metavar="NAME", help="quality of service")
    group.add_argument("--time", metavar="LIMIT", help="such as 24:00:00; the run goes on in the next job")
    group.add_argument("--cpus-per-task", type=int, metavar="N", help="cores of each machine")
    group.add_argument("--mem", metavar="SIZE", help="memory of each machine, such as 900G")
    group.add_argument("--constraint", metavar="FEATURE", help="what machines must have")
    group.add_argument("--grace", type=int, metavar="S", help=f"seconds before the limit to save (default {GRACE_S})")
    group.add_argument("--setup", type=Path, metavar="FILE", help="shell lines to run first, such as module load")
    group.add_argument("--sbatch", action="append", metavar="OPTION", help="any other option of sbatch; repeatable")


class _Kept(BaseModel):
    job: str
    folder: str


class Slurm:
    """A Slurm cluster whose commands are here."""

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """Let Slurm itself say whether it would take the job."""
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "there is no sbatch here; launch from a login node, or --dry-run DIR on a disk that the cluster sees, "
                "and `sbatch DIR/job.sh` there"
            )
        text = self.files(submission, options)[SCRIPT]
        _slurm(["sbatch", "--test-only"], given=text)

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """The script, the run file and the plan."""
        setup = ""
        if options.setup is not None:
            try:
                setup = options.setup.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--setup {options.setup} cannot be read: {error}") from None
        folder = words.folder_name("run.dir", str(launch_folder(Path(submission.config.run.dir))))
        if options.dry_run is not None:
            # What was written for review can be submitted as it lies: nobody may have made the other folder.
            folder = words.folder_name("--dry-run", str(options.dry_run.resolve()))
        workdir = str(options.workdir or os.getcwd())
        return {**submission.files(), SCRIPT: script_of(submission, options, folder, workdir, setup)}

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Submit the script."""
        job = _slurm(["sbatch", "--parsable", str(folder / SCRIPT)]).strip().partition(";")[0]
        return {"job": job, "folder": str(folder), "rank_logs": f"{folder}/{job}-rank"}

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """The job."""
        return _Kept

    def status(self, record: Mapping[str, Any]) -> Status:
        """What Slurm says, or what the script has left when Slurm has forgotten the job."""
        job, shown = record["job"], _show(record["job"])
        ended = Path(record["folder"]) / f"ended-{job}"
        state, reason = shown.get("JobState", ""), shown.get("Reason", "None")
        said = f"job {job} {state}" + (f", {reason}" if reason not in ("None", "") else "")
        if state in _WAITING:
            return Status("waiting", said)
        if state in _RUNNING:
            return Status("running", f"{said}, on {shown.get('NodeList', '')}")
        if ended.exists():
            return _of_code(int(ended.read_text().strip() or 1), f"job {job}")
        if state.startswith("CANCELLED"):
            return Status("stopped", said)
        if state:
            return Status("failed", f"{said}; `meshwright launch logs` shows why")
        return Status("lost", f"Slurm knows no job {job} any more, and it left no word")

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """What the script and every machine wrote."""
        folder, job = Path(record["folder"]), record["job"]
        nodes = [folder / f"{job}-node{node}.log" for node in range(_most_nodes(folder))]
        files = [folder / f"slurm-{job}.log", *nodes]
        return lines_of(files, lambda: follow and self.status(record).state in ("waiting", "running"))

    def stop(self, record: Mapping[str, Any]) -> str:
        """Ask a running job to save and end, without coming back; take a waiting one out of the queue."""
        job, found = record["job"], self.status(record)
        if found.state not in ("waiting", "running"):
            raise UserError(f"job {job} does not run: {found.detail}")
        (Path(record["folder"]) / f"stop-{job}").touch()
        if found.state == "waiting":
            _slurm(["scancel", job])
            return f"took job {job} out of the queue"
        _slurm(["scancel", "--batch", "--signal=USR1", job])
        return f"asked job {job} to save and end"


def _most_nodes(folder: Path) -> int:
    """Machines that the script asks for, at most."""
    try:
        script = (folder / SCRIPT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / SCRIPT}, which was submitted, cannot be read: {error}") from None
    asked = re.search(r"#SBATCH --nodes=(?:\d+-)?(\d+)", script)
    return int(asked[1]) if asked else 1


def _of_code(code: int, who: str) -> Status:
    state: State = "failed"
    if code == ExitCode.DONE:
        state = "finished"
    elif code == ExitCode.PREEMPTED:
        return Status("stopped", f"{who} saved and ended; launch it again to go on")
    return Status(state, f"{who} ended with {code}")


def _show(job: str) -> dict[str, str]:
    """What Slurm knows of a job; nothing once it has forgotten it."""
    try:
        text = _slurm(["scontrol", "--oneliner", "show", "job", job])
    except UserError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def _slurm(command: list[str], given: str | None = None) -> str:
    """Run one of Slurm's commands; what it complains of is told in its own words."""
    try:
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise ConfigError(f"there is no {command[0]} here; is this a machine of the Slurm cluster?") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within two minutes; is slurmctld up?") from None
    if ended.returncode:
        said = " ".join(line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip())
        told = said or f"{command[0]} ended with {ended.returncode}"
        if "Unable to contact slurm controller" in told:
            raise UserError(f"Slurm does not answer: {told}; is slurmctld up? `scontrol ping` shows it")
        raise UserError(f"Slurm refuses: {told}")
    return ended.stdout


TARGET = Slurm()
