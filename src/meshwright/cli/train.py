"""Train a model: here, on n local processes, or as one rank of a job that a launcher such as torchrun started.

Settings come from the preset, then the TOML file, then section.key=value arguments; later ones win. A run folder
that holds an unfinished run of the same settings goes on from its latest checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from meshwright.checkpoint.place import prepare_place
from meshwright.cli.settings import describe_settings, machine_range, resolved_settings
from meshwright.config import RunConfig
from meshwright.errors import ConfigError, UserError
from meshwright.launch.adopted import Machine, adopt_local_rank, adopt_slurm, pet_machine, pet_processes
from meshwright.secrets import guarded_output
from meshwright.strategy import AUTO, Strategy
from meshwright.torch_support import imported_for_good, require_torch
from meshwright.training.job import batch_schedule, make_job
from meshwright.training.planned import asks_planner, plan_run
from meshwright.training.run_folder import RunFolder

if TYPE_CHECKING:
    from meshwright.elastic.rendezvous import Nodes


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright train`."""
    describe_settings(parser)
    nproc = ("--nproc", "--nproc-per-node", "--nproc_per_node")
    parser.add_argument(
        *nproc, dest="nproc", metavar="N|auto", help="local processes (default: what the strategy takes, or 1)"
    )
    parser.add_argument(
        *("--nodes", "--nnodes"),
        dest="nodes",
        metavar="N|MIN:MAX",
        help="machines that train together (default: this one)",
    )
    endpoint = ("--rendezvous", "--rdzv-endpoint", "--rdzv_endpoint")
    parser.add_argument(*endpoint, dest="rendezvous", metavar="HOST:PORT", help="where `meshwright rendezvous` listens")
    run_id = ("--run-id", "--rdzv-id", "--rdzv_id")
    parser.add_argument(*run_id, dest="run_id", metavar="ID", help="refuse a rendezvous that serves another run")
    parser.add_argument(
        *("--local-rank", "--local_rank"),
        dest="local_rank",
        type=int,
        metavar="R",
        help="said by launchers to their ranks",
    )
    parser.add_argument("--fresh", action="store_true", help="set an earlier run in run.dir aside and start anew")
    parser.add_argument(
        "--explain", action="store_true", help="print every setting, its value, origin and meaning; train nothing"
    )
    parser.epilog = (
        "examples:\n"
        "  meshwright train --preset demo --nproc 2\n"
        "  meshwright train run.toml train.steps=100 train.lr=1e-3 --nproc auto\n"
        "  meshwright train run.toml --nproc 8 --nodes 2:4 --rendezvous 10.0.0.5:29400   # the same on every machine\n"
        "  torchrun --nproc-per-node 4 -m meshwright train run.toml\n"
        "  deepspeed --num_gpus 4 --module meshwright train run.toml\n"
    )


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run reached its end, 75 when it was asked to stop and saved."""
    if args.local_rank is not None:
        adopt_local_rank(args.local_rank, os.environ)
    machine = None if args.explain else _launched(args)
    if machine is not None:
        return _train_on(machine, args)
    fresh, quiet = ["run.fresh=true"] if args.fresh else [], os.environ.get("RANK", "0") != "0"
    resolved = resolved_settings(args, lambda: _ranks(args), fresh, quiet)
    if args.explain:
        from meshwright.cli.explain import print_settings

        print_settings(resolved)
        return 0
    with guarded_output(resolved.config.secrets()):
        return _train(args, resolved.config)


def _launched(args: argparse.Namespace) -> Machine | None:
    """Take what Slurm or PET_* say where the arguments say nothing; gives this machine, if it is one of several."""
    if "RANK" in os.environ or any(one is not None for one in (args.nodes, args.rendezvous, args.nproc)):
        return None
    if (machine := pet_machine(os.environ)) is not None:
        return machine
    told = adopt_slurm(os.environ)
    if told is None:
        args.nproc = pet_processes(os.environ)
    elif os.environ["RANK"] == "0":
        print(told, flush=True)
    return None


def _train_on(machine: Machine, args: argparse.Namespace) -> int:
    """Train as one machine of several, as PET_* say."""
    from meshwright.launch.node import main as node

    meeting = ["--nodes", machine.nodes, "--rank", str(machine.rank), "--rendezvous", machine.endpoint]
    options = {
        "--preset": args.preset, "--deepspeed": args.deepspeed, "--megatron-args": args.megatron_args,
        "--nproc": machine.processes,
    }  # fmt: skip
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    given += [*args.settings, *(["--fresh"] if args.fresh else [])]
    print(f"machine {machine.rank} of {machine.nodes} by PET_*; they meet at {machine.endpoint}", flush=True)
    return node([*meeting, "--run-id", machine.run_id, "--", *given])


def _ranks(args: argparse.Namespace) -> tuple[int | None, bool]:
    """How many ranks there will be, None for what the strategy takes; and whether that is open until they meet."""
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"]), False
    nodes = args.nodes or ("" if args.rendezvous else "1")
    local = args.nproc or ("1" if args.rendezvous else None)
    if local is None and nodes == "1":
        return None, False
    if local is None or not local.isdecimal() or not nodes.isdecimal():
        return None, True
    return int(local) * int(nodes), False


def _train(args: argparse.Namespace, config: RunConfig) -> int:
    """Train a configuration on the processes and machines that the arguments ask for."""
    require_torch()
    launched = "RANK" in os.environ
    if launched and args.nproc is not None:
        raise ConfigError("a launcher started this process (RANK is set) and says how many there are; drop --nproc")
    nproc = 1 if launched else _processes(args.nproc or ("1" if args.rendezvous else None), config)
    # Read when numpy and torch are imported: ranks share the cores instead of fighting for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    several = args.nodes is not None or args.rendezvous is not None
    if several and launched:
        raise ConfigError("a launcher started this process (RANK is set); drop --nodes and --rendezvous")
    planned = None
    if not launched and not several:
        # Before the seconds that torch takes to import: mistakes are told at once.
        planned = plan_run(config, nproc)
        make_job(planned.config, nproc)
        if config.checkpoint.dir is not None:
            prepare_place(config.checkpoint.dir)
    with imported_for_good():
        from meshwright.elastic.failure import RankError
        from meshwright.trainer import train
        from meshwright.training.hooks import STOP_SIGNALS

    began = time.time()
    try:
        nodes = _nodes(args, config) if several else None
        ending = train(config, nproc, supervised=True, nodes=nodes, planned=planned)
        for number in STOP_SIGNALS:
            # It has ended and says how: a signal that comes too late does not change that.
            signal.signal(number, signal.SIG_IGN)
        return ending
    except RankError as error:
        print(f"meshwright train: {error}", file=sys.stderr)
        _report_failure(RunFolder(config.run.dir), began)
        return error.exit_code
    except UserError:
        # What a rank has found wrong with the run.
        _report_failure(RunFolder(config.run.dir), began)
        raise


def _report_failure(folder: RunFolder, began: float) -> None:
    """Leave the report of a run that this command has worked on and given up, as one that ends has it."""
    from meshwright.observe.end_report import leave_report
    from meshwright.observe.rank_times import fact

    since = [event["event"] for event in folder.read_events() if fact(event, "time") >= began]
    if {"started", "resumed"} & set(since) and since[-1] == "gave_up":
        leave_report(folder)


def _nodes(args: argparse.Namespace, config: RunConfig) -> Nodes:
    """How many machines train together, and where they meet."""
    from meshwright.elastic.rendezvous import Endpoint, Nodes

    if args.rendezvous is None:
        raise ConfigError("--nodes needs --rendezvous HOST:PORT; `meshwright rendezvous` serves one")
    return Nodes(
        *machine_range(args.nodes or "1:1024"),
        Endpoint.parse(args.rendezvous, "--rendezvous"),
        args.run_id,
        config.elastic.join_timeout_s,
        config.elastic.quarantine_failures,
        config.elastic.quarantine_window_s,
    )


def _processes(argument: str | None, config: RunConfig) -> int:
    """How many local processes to start."""
    text = AUTO if asks_planner(config) else config.parallel.strategy
    asked = Strategy.processes(text)
    if argument is None or (argument == "auto" and asked is not None):
        return asked or Strategy.fewest_processes(text)
    if argument != "auto":
        if not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"--nproc takes a whole number from 1, or auto, not '{argument}'")
        return int(argument)
    from meshwright.parallel.world import available_cores, visible_gpus

    limit = (visible_gpus() if config.run.device != "cpu" else 0) or available_cores()
    # The most processes that the cores (or GPUs) carry and that share every batch evenly.
    sizes = batch_schedule(config).sizes()
    unit = config.train.micro_batch or 1
    return max(n for n in range(1, limit + 1) if n == 1 or all(size % (n * unit) == 0 for size in sizes))
