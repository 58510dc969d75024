"""One rank of a run on Ray: a worker of Ray Train.

Ray says which rank it is and where the ranks meet; the process group is the trainer's own, as for any launcher's job,
so there is one. A rank that finds something wrong which starting again would not mend says so at the desk and returns;
whatever else ends it is an error, after which Ray starts all workers again and the run goes on from its newest
checkpoint.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from meshwright.config import RunConfig
from meshwright.elastic.failure import LOST_CONNECTION
from meshwright.errors import ExitCode, UserError
from meshwright.launch.local import stay_on_loopback

VERDICT_S = 10.0
"""How long a rank that has lost the others waits for the word of one that gave up."""


@dataclass
class Meeting(TorchConfig):
    """Names the place where the ranks meet, in place of Ray's own process group."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Meet


class _Meet(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        host, port = worker_group.execute_single(0, _listen)
        worker_group.execute(_take_place, host, port)


_listening: list[socket.socket] = []
"""Of the first rank, from when Ray sets up its process until it trains: nobody else can take the port meanwhile."""


def _listen() -> tuple[str, int]:
    """Listen on this machine's address in Ray, and on no other: PyTorch's own store would on all of them."""
    host = ray.util.get_node_ip_address()
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    _listening[:] = [listener]
    return host, int(listener.getsockname()[1])


def _take_place(host: str, port: int) -> None:
    """What torchrun would set."""
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
    }


def work(given: dict[str, Any]) -> dict[str, Any] | None:
    """Train as this worker; the first rank gives how it ended."""
    desk = given["desk"]
    try:
        if ray.get(desk.verdict.remote()) is not None:
            return None
        code = _train(given, desk)
    except UserError as error:
        if getattr(error, "remedied", False):
            raise
        ray.get(desk.give_up.remote(int(error.exit_code), str(error)))
        return None
    except Exception as error:
        follows = any(sign in f"{type(error).__name__}: {error}" for sign in LOST_CONNECTION)
        if _somebody_gave_up(desk, VERDICT_S if follows else 0.0):
            return None
        raise
    return {"code": int(code)}


def _somebody_gave_up(desk: Any, wait_s: float) -> bool:
    """Whether this error only follows from a rank that has left."""
    deadline = time.monotonic() + wait_s
    while ray.get(desk.verdict.remote()) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _train(given: dict[str, Any], desk: Any) -> ExitCode:
    if Path(given["folder"]).is_dir():
        os.chdir(given["folder"])
    _quieten_reports()
    config = RunConfig.model_validate(given["config"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    group = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    _take_interface(group, local == size)

    from meshwright.launch.ray_reports import Reports, follow
    from meshwright.trainer import train_launched
    from meshwright.training.run_folder import RunFolder

    if rank == 0:
        ray.get(desk.begin.remote(group, RunFolder(config.run.dir).last_recorded_step()))
        if (verdict := ray.get(desk.verdict.remote())) is not None:
            return ExitCode(verdict[0])
    config = _again(config, ray.get(desk.starts.remote()))
    planned = _planned(config, desk, group, size, local) if given["elastic"] else None
    if planned is not None and rank >= planned.world:
        follow(desk, group)
        return ExitCode.DONE
    store = _store(host, int(port), config.elastic.timeout_s, first=rank == 0)
    ranks = rank, planned.world if planned is not None else size, int(os.environ["LOCAL_RANK"])
    os.environ["WORLD_SIZE"] = str(ranks[1])
    return train_launched(config, ranks, [Reports(desk, group)], planned, store)


def _quieten_reports() -> None:
    """Drop the line that every worker writes for each report: its logger is one that Ray's log level does not reach."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not record.getMessage().startswith("Reporting training result"))


def _store(host: str, port: int, timeout_s: float, first: bool) -> Any:
    from meshwright.parallel.torch_releases import TCPStore

    timeout = timedelta(seconds=timeout_s)
    if not first:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    descriptor = _listening.pop().detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


def _again(config: RunConfig, starts: int) -> RunConfig:
    """Only the first start of a run may set an earlier one aside."""
    if starts <= 1 or not config.run.fresh:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"fresh": False})})


def _planned(config: RunConfig, desk: Any, group: str, size: int, local: int) -> Any:
    """What all ranks do on as many workers as Ray has: the first one plans, the others take its answer."""
    from meshwright.training.planned import Planned, plan_ranks, with_choice

    if os.environ["RANK"] == "0":
        found = plan_ranks(config, size, local)
        for line in found.said:
            print(line, flush=True)
        ray.get(desk.settle.remote(group, [found.strategy, found.micro_batch, found.world, list(found.said)]))
        return found
    while (told := ray.get(desk.plan.remote(group))) is None:
        if ray.get(desk.verdict.remote()) is not None:
            raise RuntimeError("the first rank gave up before it had a plan")
        time.sleep(0.2)
    strategy, micro_batch, world, said = told
    return Planned(with_choice(config, strategy, micro_batch), config, world, local, tuple(said))


def _take_interface(group: str, alone: bool) -> None:
    """Talk over the interface that leads to the first rank; within one machine over loopback."""
    if alone:
        stay_on_loopback()
        return
    from meshwright.elastic.rendezvous import Endpoint, interface_to

    interface = interface_to(Endpoint.parse(group, "Ray's first worker"))
    if interface is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
