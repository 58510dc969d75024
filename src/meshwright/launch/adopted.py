"""Ranks and machines as launchers name them in the environment: `srun meshwright train`, a Kubeflow pod. No torch.

What torchrun and its like set for a rank (RANK, WORLD_SIZE, LOCAL_RANK) is read where ranks meet. Here is what others
set: Slurm for each task, and PET_*, torchrun's options as variables, which Kubeflow sets for each machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from meshwright.errors import ConfigError

FIRST_PORT, PORTS = 20_000, 20_000
"""Of jobs by their number, so that two on one machine do not meet."""


@dataclass(frozen=True)
class Machine:
    """One machine of several, by PET_*."""

    nodes: str
    """A number, or MIN:MAX."""
    rank: int
    endpoint: str
    run_id: str
    processes: str | None


def slurm_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set for this task of srun; nothing where it is none of several."""
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return {}
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    each = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    local = _tasks_of(each, int(environment.get("SLURM_NODEID", "0")))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        **({"LOCAL_WORLD_SIZE": str(local)} if local else {}),
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + job % PORTS),
    }


def _tasks_of(words: str, node: int) -> int | None:
    """Tasks of a machine by Slurm's "2(x3),1"."""
    counts = [
        int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", words) for _ in range(int(times or 1))
    ]
    return counts[node] if node < len(counts) else None


def _first(nodes: str) -> str:
    """The address of the first machine of Slurm's list, such as gpu[03-07],login."""
    try:
        name = _scontrol("hostnames", nodes).split()[0]
        address = re.search(r"NodeAddr=(\S+)", _scontrol("node", name))
    except (OSError, IndexError, subprocess.CalledProcessError):
        raise ConfigError(
            f"srun started this process on {nodes or 'machines without a name'}, and scontrol does not say which is "
            "the first; set MASTER_ADDR"
        ) from None
    return address[1] if address else name


def _scontrol(what: str, name: str) -> str:
    return subprocess.run(["scontrol", "show", what, name], capture_output=True, text=True, check=True).stdout


def pet_machine(environment: Mapping[str, str]) -> Machine | None:
    """This machine of several by PET_*; None where it is alone, or a launcher has started this rank."""
    nodes = environment.get("PET_NNODES", "1")
    if "RANK" in environment or nodes in ("1", "1:1"):
        return None
    if not re.fullmatch(r"\d+(:\d+)?", nodes):
        raise ConfigError(f"PET_NNODES={nodes} is not a number of machines or MIN:MAX")
    endpoint = environment.get("PET_RDZV_ENDPOINT", "")
    said = re.fullmatch(r"(\[.+\]|[^:]*)(?::(\d*))?", endpoint)
    if said is None:
        raise ConfigError(f"PET_RDZV_ENDPOINT={endpoint} is not HOST:PORT; IPv6 goes in brackets: [fd00::5]:29400")
    host, port = (
        said[1] or environment.get("PET_MASTER_ADDR", ""),
        said[2] or environment.get("PET_MASTER_PORT", "29400"),
    )
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    rank = environment.get("PET_NODE_RANK", "")
    if not host or not rank.isdecimal():
        raise ConfigError(
            f"PET_NNODES={nodes} says that there are several machines; PET_NODE_RANK and PET_MASTER_ADDR (or "
            "PET_RDZV_ENDPOINT) must say which this is and where the first one is"
        )
    if int(rank) >= int(nodes.rpartition(":")[2]):
        raise ConfigError(f"PET_NODE_RANK={rank} is none of PET_NNODES={nodes} machines, which are numbered from 0")
    run_id = environment.get("PET_RDZV_ID") or f"{host}-{port}"
    return Machine(nodes, int(rank), f"{host}:{port}", run_id, pet_processes(environment))


def pet_processes(environment: Mapping[str, str]) -> str | None:
    """Processes of this machine by PET_NPROC_PER_NODE, as --nproc takes it."""
    found = environment.get("PET_NPROC_PER_NODE")
    return "auto" if found in ("auto", "gpu", "cpu", "xpu") else found


def adopt_slurm(environment: MutableMapping[str, str]) -> str | None:
    """Take a task of srun for a rank; gives what to tell about it."""
    found = slurm_rank(environment)
    if not found:
        return None
    environment.update(found)
    return f"rank {found['RANK']} of {found['WORLD_SIZE']}, as srun started it; they meet at {found['MASTER_ADDR']}"


def adopt_local_rank(said: int, environment: MutableMapping[str, str]) -> None:
    """Take --local-rank as launchers give it to a rank; the variables say the rest, and the same."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        raise ConfigError(
            f"--local-rank {said} is what a launcher says to its ranks, and none set RANK and WORLD_SIZE; drop it, or "
            "start with torchrun or deepspeed"
        )
    if environment.setdefault("LOCAL_RANK", str(said)) != str(said):
        raise ConfigError(f"--local-rank {said}, and LOCAL_RANK is {environment['LOCAL_RANK']}; drop one of them")
