"""A real Slurm on this machine: munge, a controller, and two nodes of two cores, all in a folder of their own.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge, as CI has; nothing listens beyond loopback. A job
that is put back into the queue waits until its credential has expired: 15 seconds here, two minutes by default.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Gives the variables with which its commands find it."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if os.geteuid() != 0 or any(shutil.which(program, path=path) is None for program in PROGRAMS):
        pytest.skip("needs root and Debian's slurmctld, slurmd, slurm-client and munge")
    host = socket.gethostname().partition(".")[0]
    controller, *ports = free_ports(3)
    for name in ("state", "spool-first", "spool-second", "munge"):
        (folder / name).mkdir()
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o400)
    (folder / "slurm.conf").write_text(
        f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=15
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=20
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=2 State=UNKNOWN
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=first,second Default=YES MaxTime=INFINITE State=UP
"""
    )
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={folder}/munge/key", f"--socket={folder}/munge/socket"),
        *(f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"),
    ]
    daemons = []
    try:
        for command in (
            munge,
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", "first"],
            ["slurmd", "-D", "-N", "second"],
        ):
            with (folder / "daemons.out").open("a") as out:
                daemons.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge/socket").exists(), folder)
        _wait_for(lambda: _state(environment).split() == ["idle"], folder)
        yield {"SLURM_CONF": environment["SLURM_CONF"], "PATH": path}
    finally:
        subprocess.run(
            ["scancel", "--full", "--user=root"], env=environment, check=False, capture_output=True, timeout=20
        )
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _state(environment: dict[str, str]) -> str:
    shown = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, check=False, capture_output=True, text=True)
    return shown.stdout


def _wait_for(there: object, folder: Path) -> None:
    assert callable(there)
    deadline = time.monotonic() + 30
    while not there():
        told = "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in folder.glob("*.log"))
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
