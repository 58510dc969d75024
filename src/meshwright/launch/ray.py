"""Ray as a target: a job of a Ray cluster, a Ray of this machine in the background, or the Ray that this runs in.

`--ray-address http://HOST:8265` submits a job through the cluster's job API. Where RAY_ADDRESS names a Ray to join, as
inside of a job or a KubeRay cluster, or with --foreground, the run is driven from here until it ends. Else a Ray is
started on this machine, on loopback, and ends with the run. `fit` is the same for Python. No torch, nor ray.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.launch import detached
from meshwright.launch.lines import lines_of
from meshwright.launch.local_machine import status_of
from meshwright.launch.ray_main import LOOPBACK_ONLY, drive, require_ray
from meshwright.launch.submission import PLAN_FILE, RUN_FILE, Machines, Submission
from meshwright.launch.target import OfProcess, Status
from meshwright.strategy import Strategy
from meshwright.training.planned import asks_planner

if TYPE_CHECKING:
    from ray.train import Result

    from meshwright.launch.ray_driver import Workers

NAME, SCRIPT, JOB = "ray", "ray.sh", "job.json"
GRACE_S = 600
"""How long Ray waits for a job that was asked to stop: the step in hand, and a save."""
CURRENT = "ray/ray_current_cluster"
"""Where `ray start` leaves the address of the Ray of this machine."""
_ADDRESS = re.compile(r"auto|local|https?://[^\s/]\S*|(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")


def describe(group: argparse._ArgumentGroup) -> None:
    """Options of Ray."""
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="http://HOST:8265 submits a job; HOST:PORT or auto joins a Ray in the foreground (default: RAY_ADDRESS, "
        "or a Ray that is started here)",
    )
    group.add_argument("--ray-storage", metavar="PATH", help="Ray's storage_path (default: the parent of run.dir)")
    group.add_argument("--ray-cpus", type=float, default=1.0, metavar="C", help="CPUs of each rank, as Ray counts them")
    group.add_argument("--foreground", action="store_true", help="drive the run from here until it ends")


def fit(
    config: RunConfig,
    workers: Workers | int | tuple[int, int] = 1,
    *,
    storage_path: str | None = None,
    callbacks: Sequence[Any] = (),
) -> Result:
    """Train a run with Ray Train on what `ray.init` has joined; gives Ray's Result.

    `workers` is a number of ranks, MIN and MAX of it, or `meshwright.launch.ray_driver.Workers` with GPUs and CPUs.
    """
    require_ray()
    from meshwright.launch.ray_driver import fit

    return fit(config, workers, storage_path=storage_path, callbacks=callbacks)


def says_machines(options: argparse.Namespace) -> bool:
    """Whether the options say what machines there are."""
    return any(one is not None for one in (options.nodes, options.processes, options.gpus_per_node, options.gpu))


def machines_of(config: RunConfig, options: argparse.Namespace) -> Machines | None:
    """What a run takes that was planned before: of the plan beside its file, or of its strategy."""
    if says_machines(options) or asks_planner(config):
        return None
    file = next((Path(word) for word in options.settings if "=" not in word), None)
    if file is not None:
        try:
            plan = json.loads((file.parent / PLAN_FILE).read_text(encoding="utf-8"))
            least, _, most = str(plan["nodes"]).partition(":")
            if plan["strategy"] == config.parallel.strategy:
                return Machines(int(least), int(most or least), int(plan["processes_per_node"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # It is not there, or another's.
    text = config.parallel.strategy
    return Machines(processes=Strategy.processes(text) or Strategy.fewest_processes(text))


class _OfJob(BaseModel):
    address: str
    job: str


class Ray:
    """A Ray cluster, or a Ray of this machine."""

    def foreground(self, submission: Submission, options: argparse.Namespace) -> int | None:
        """Drive the run from here; None where it is not to be."""
        address = _address(options)
        if _is_job(address):
            if options.foreground:
                raise ConfigError(f"--foreground joins a Ray, and {address} takes jobs; drop one of them")
            return None
        if address is None and options.foreground and (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / CURRENT).exists():
            address = "auto"
        if address is None and not options.foreground:
            return None
        if address is None:
            _refuse_machines(submission)
        workers = _workers(submission, options)
        return drive(submission.config, workers, address, options.ray_storage)

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """Ask the cluster whether it is there."""
        address = _address(options)
        if _is_job(address):
            _client(str(address)).get_version()
        else:
            _refuse_machines(submission)
            require_ray()

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """The run file, the plan, and the job or the command."""
        files = submission.files()
        if _is_job(_address(options)):
            return {**files, JOB: json.dumps(_job(submission, options), indent=1) + "\n"}
        command = shlex.join([*_command(submission, options), "--workdir", str(options.workdir or os.getcwd())])
        return {**files, SCRIPT: f'#!/bin/sh\ncd "$(dirname "$0")" && exec env {"=".join(LOOPBACK_ONLY)} {command}\n'}

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Submit the job, or start a Ray here in a session of its own."""
        address = _address(options)
        if not _is_job(address):
            facts = detached.start(folder, NAME, [str(folder.resolve() / SCRIPT)])
            return {"folder": str(folder.resolve()), "pid": facts["pid"]}
        job = _job(submission, options)
        environment = {**job["runtime_env"], "working_dir": str(folder.resolve())}
        given = {**job, "runtime_env": environment, "submission_id": f"{submission.name}-{secrets.token_hex(4)}"}
        return {"address": address, "job": _client(str(address)).submit_job(**given)}

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """The job, or the process."""
        return _OfJob if "job" in record else OfProcess

    def status(self, record: Mapping[str, Any]) -> Status:
        """What Ray says of the job, or its process."""
        if "job" not in record:
            return status_of(*detached.state(Path(record["folder"]), NAME), f"process {record['pid']}")
        return _status_of_job(record)

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """The output of driver and ranks."""
        if "job" not in record:
            folder = Path(record["folder"])
            return lines_of([folder / f"{NAME}.log"], lambda: follow and detached.state(folder, NAME)[0] == "running")
        return self._lines_of_job(record, follow)

    def _lines_of_job(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        told = 0
        while True:
            last = not follow or self.status(record).state not in ("waiting", "running")
            text = _client(record["address"]).get_job_logs(record["job"])
            end = len(text) if last else text.rfind("\n") + 1
            yield from text[told:end].splitlines()
            told = end
            if last:
                return
            time.sleep(1.0)

    def stop(self, record: Mapping[str, Any]) -> str:
        """SIGTERM to the driver: all ranks save, and it ends."""
        if "job" in record:
            if not _client(record["address"]).stop_job(record["job"]):
                raise UserError(f"job {record['job']} does not run any more")
            return f"asked job {record['job']} to save and end"
        if not detached.send(Path(record["folder"]), NAME, signal.SIGTERM):
            raise UserError(f"process {record['pid']} is not there any more")
        return f"asked process {record['pid']} to save and end"


def _address(options: argparse.Namespace) -> str | None:
    found: str | None = options.ray_address or os.environ.get("RAY_ADDRESS") or None
    if found is not None and found.startswith("ray://"):
        raise ConfigError(f"{found} is Ray's client, which Ray Train does not run over; give http://HOST:8265")
    if found is not None and not _ADDRESS.fullmatch(found):
        option = "--ray-address" if options.ray_address else "RAY_ADDRESS"
        raise ConfigError(f"{option} '{found}' is neither http://HOST:8265 nor HOST:PORT, auto or local")
    return None if found == "local" else found


def _is_job(address: str | None) -> bool:
    return address is not None and address.startswith(("http://", "https://"))


def _refuse_machines(submission: Submission) -> None:
    if submission.machines.most > 1:
        raise ConfigError("a Ray that is started here is one machine; drop --nodes, or give --ray-address")


def _workers(submission: Submission, options: argparse.Namespace) -> dict[str, Any]:
    machines = submission.machines
    if not 0 < options.ray_cpus < math.inf:
        raise ConfigError(f"--ray-cpus {options.ray_cpus:g}: a rank takes more than none, such as 1 or 0.5")
    return {
        "least": machines.least * machines.processes,
        "most": machines.world,
        "gpus": _gpus(submission, options),
        "cpus": options.ray_cpus,
        "environment": dict(submission.environment),
    }


def _gpus(submission: Submission, options: argparse.Namespace) -> bool | None:
    """Whether each rank has a GPU; None is what the cluster has."""
    if submission.machines.gpus:
        return True
    return False if options.gpus_per_node == 0 or submission.config.run.device == "cpu" else None


def _command(submission: Submission, options: argparse.Namespace) -> list[str]:
    """The driver, but for the Ray that it joins."""
    found = _workers(submission, options)
    gpus = {True: "yes", False: "no", None: "auto"}[found["gpus"]]
    command = [str(options.python or sys.executable), "-m", "meshwright.launch.ray_main", RUN_FILE]
    command += ["--workers", f"{found['least']}:{found['most']}", "--gpus", gpus, "--cpus", f"{found['cpus']:g}"]
    if options.ray_storage is not None:
        command += ["--storage", options.ray_storage]
    for name, value in submission.environment.items():
        command += ["--env", f"{name}={value}"]
    return command


def _job(submission: Submission, options: argparse.Namespace) -> dict[str, Any]:
    """What is submitted; the folder with the run file goes with it."""
    command = [*_command(submission, options), "--address", "auto", "--workdir", str(options.workdir or os.getcwd())]
    variables = {**submission.environment, "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}
    return {
        "entrypoint": f"exec {shlex.join(command)}",
        "runtime_env": {"working_dir": ".", "env_vars": variables},
        "metadata": {"name": submission.name, "strategy": submission.config.parallel.strategy},
    }


def _status_of_job(record: Mapping[str, Any]) -> Status:
    job = record["job"]
    try:
        info = _client(record["address"]).get_job_info(job)
    except RuntimeError as error:
        if "404" in str(error) or "does not exist" in str(error):
            return Status("lost", f"Ray knows no job {job} any more")
        raise UserError(f"Ray does not say how job {job} is: {error}") from None
    match str(info.status):
        case "PENDING":
            return Status("waiting", f"job {job}")
        case "RUNNING":
            return Status("running", f"job {job}")
        case "SUCCEEDED":
            return Status("finished", f"job {job}")
        case "STOPPED":
            return Status("stopped", f"job {job} saved and ended; launch it again to go on")
    if info.driver_exit_code == ExitCode.PREEMPTED:
        return Status("stopped", f"job {job} saved and ended; launch it again to go on")
    return Status("failed", f"job {job} ended with {info.driver_exit_code}; `meshwright launch logs` shows why")


def _client(address: str) -> Any:
    """Ray's job API at an address."""
    require_ray()
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = "what answers there is something else" if isinstance(error, json.JSONDecodeError) else error
        raise ConfigError(f"no Ray takes jobs at {address}: {reason}") from None


TARGET = Ray()
