"""Launch a run where your machines are: here in the background, on hosts by ssh, on Slurm, Kubernetes or Ray.

The strategy is planned for those machines before anything is submitted, and the plan is part of what is submitted.
--dry-run DIR writes exactly that, for review and git, and submits nothing. What was launched is found again by its run
folder: meshwright launch status|logs|stop RUN."""

from __future__ import annotations

import argparse
import shlex
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.cli.main import Action
from meshwright.cli.settings import describe_settings, machine_range, resolved_settings
from meshwright.config import RunConfig
from meshwright.errors import ConfigError, UserError
from meshwright.launch import ray
from meshwright.launch.alone import alone
from meshwright.launch.hosts import hosts_of
from meshwright.launch.lines import lines_of
from meshwright.launch.submission import Machines, Submission, chip_of, prepare
from meshwright.launch.target import (
    RECORD,
    Target,
    check_record,
    launch_folder,
    rank_file,
    read_record,
    write_files,
    write_record,
)
from meshwright.launch.variables import refuse_taken
from meshwright.secrets import guarded_output, holds_secret, is_secret_variable
from meshwright.training.run_folder import RunFolder

TARGETS = {
    "local": "local_machine",
    "hosts": "hosts",
    "slurm": "slurm",
    "kubernetes": "kubernetes.cluster",
    "ray": "ray",
}
"""Names of targets, and their modules in meshwright.launch."""
SECRETS_BY = {
    "local": "export it in this shell, whose variables the run has",
    "hosts": "export it on the hosts, or say --ssh 'ssh -o SendEnv={name} {{host}}' where their sshd accepts it",
    "slurm": "export it in this shell, whose variables sbatch hands on, or in --setup FILE",
    "kubernetes": "say --secret-env {name}=SECRET:KEY",
    "ray": "export it where Ray is started",
}
"""How a secret reaches the processes of a run, by target."""


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright launch`."""
    describe_settings(parser)
    parser.add_argument("--on", required=True, choices=TARGETS, help="where")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="write what would be submitted; submit nothing")
    parser.add_argument("--anyway", action="store_true", help="also a strategy that the plan does not expect to fit")
    parser.add_argument("--nodes", metavar="N|MIN:MAX", help="machines (default: all hosts that are named, else 1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="G", help="GPUs of each (default 8 with --gpu, else 0)")
    parser.add_argument(
        *("--processes-per-node", "--nproc-per-node", "--nproc_per_node", "--nproc"),
        dest="processes",
        type=int,
        metavar="P",
        help="ranks of each (default: one for each GPU; without GPUs the hosts' slots, or 1)",
    )
    parser.add_argument("--gpu", metavar="CHIP", help="what GPUs they are, such as h100: what the plan is for")
    parser.add_argument("--python", metavar="PATH", help="Python of those machines (default: this one's path)")
    parser.add_argument(
        "--workdir", metavar="DIR", help="where commands run there (default: this folder; in pods the first claim)"
    )
    parser.add_argument("--name", help="what schedulers call it (default: the run folder's name)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of all its processes; repeatable"
    )
    own = {}
    for target, module in TARGETS.items():
        group = parser.add_argument_group(f"--on {target}")
        import_module(f"meshwright.launch.{module}").describe(group)
        own[target] = [(action.dest, action.option_strings[0], action.default) for action in group._group_actions]
    parser.set_defaults(options_of=own)
    parser.epilog = (
        "examples:\n"
        "  meshwright launch run.toml --on local --nproc 2\n"
        "  meshwright launch run.toml --on hosts --hostfile hosts --gpu h100 --gpus-per-node 8\n"
        "  meshwright launch run.toml --on slurm --nodes 4 --gpu h100 --time 24:00:00 --dry-run review\n"
        "  meshwright launch run.toml --on kubernetes --nodes 4 --gpu h100 --image IMAGE --volume w=pvc:CLAIM:/train\n"
        "  meshwright launch run.toml --on ray --nodes 2:4 --gpu h100 --ray-address http://head:8265\n"
        "  meshwright launch run.toml --deepspeed ds_config.json --on local --nproc 2\n"
        "  meshwright launch status runs/mine && meshwright launch logs runs/mine --follow\n"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and submit; 0, or how a run ended that was driven from here."""
    _refuse_foreign(args)
    config = resolved_settings(args, lambda: _ranks(args)).config
    with guarded_output(config.secrets()):
        machines = (ray.machines_of(config, args) if args.on == "ray" else None) or _machines(args)
        _refuse_no_gpus(config, machines, args)
        chip = None if args.on == "local" else chip_of(config, machines.gpus, args.gpu)
        environment = _environment(args.env, args.on)
        submission = prepare(config, machines, chip, args.name, environment, args.anyway)
        return _launch(submission, args)


def _ranks(args: argparse.Namespace) -> tuple[int | None, bool]:
    machines = _machines(args)
    # Ray takes as many ranks as the strategy where nothing is said of machines.
    said = args.on != "ray" or ray.says_machines(args)
    return (machines.world if said else None), machines.least < machines.most


def _refuse_foreign(args: argparse.Namespace) -> None:
    """Refuse options that the target does not have, rather than leave them without effect."""
    for target, options in args.options_of.items():
        for name, flag, default in options:
            if target != args.on and getattr(args, name) != default:
                raise ConfigError(f"{flag} is for --on {target}, and this is --on {args.on}; drop it")
    if args.on == "local" and (args.python is not None or args.workdir is not None):
        raise ConfigError("--on local runs here, with this Python; drop --python and --workdir")
    if args.on == "local" and (args.gpu is not None or args.gpus_per_node is not None):
        raise ConfigError(
            "--on local takes the GPUs that are here; drop --gpu and --gpus-per-node (--nproc says how many ranks)"
        )


def _refuse_no_gpus(config: RunConfig, machines: Machines, args: argparse.Namespace) -> None:
    """Refuse a run that needs GPUs where none are asked for; this machine and Ray give those that they have."""
    asks = args.on in ("hosts", "slurm", "kubernetes") or args.gpus_per_node == 0
    if config.run.device == "cuda" and asks and not machines.gpus:
        raise ConfigError(
            "run.device=cuda, and the machines are asked for no GPUs; say --gpus-per-node or --gpu, or drop run.device"
        )


def _launch(submission: Submission, args: argparse.Namespace) -> int:
    target, config = target_named(args.on), submission.config
    for line in submission.said:
        print(line)
    files = target.files(submission, args)
    if args.dry_run is not None:
        write_files(args.dry_run, files, f"--dry-run {args.dry_run}")
        print(f"wrote {', '.join(sorted(files))} to {args.dry_run}; nothing was submitted")
        return 0
    if args.on == "ray" and (code := ray.TARGET.foreground(submission, args)) is not None:
        return code
    run_folder = Path(config.run.dir)
    folder = launch_folder(run_folder)
    with alone(folder):
        _refuse_second(folder, run_folder)
        target.check(submission, args)
        write_files(folder, files)
        record = target.submit(submission, args, folder)
        write_record(folder, args.on, submission, record)
    shown = shlex.quote(str(run_folder))
    print(f"{submission.name} is submitted: {config.parallel.strategy} on {submission.machines.world} ranks")
    print(f"  meshwright launch status {shown}\n  meshwright launch logs {shown} --follow\n  meshwright watch {shown}")
    return 0


def _refuse_second(folder: Path, run_folder: Path) -> None:
    """One launch at a time."""
    if not (folder / RECORD).exists():
        return
    record, target = _launched(run_folder)
    found = target.status(record)
    if found.state in ("waiting", "running"):
        raise UserError(
            f"{run_folder} was launched before on {record['target']} and is {found.state} ({found.detail}); "
            f"`meshwright launch stop {run_folder}` first, or choose another run.dir"
        )


def _launched(run: Path) -> tuple[dict[str, Any], Target]:
    """What was launched for a run folder, and where."""
    record = read_record(run)
    target = target_named(record["target"])
    check_record(run, record, target.kept(record))
    return record, target


def target_named(name: str) -> Target:
    """The target of that name."""
    if name not in TARGETS:
        raise UserError(f"this version launches on {', '.join(TARGETS)}, not on '{name}'")
    found: Target = import_module(f"meshwright.launch.{TARGETS[name]}").TARGET
    return found


def _machines(args: argparse.Namespace) -> Machines:
    hosts = hosts_of(args) if args.on == "hosts" else []
    least, most = machine_range(args.nodes or str(len(hosts) or 1))
    for name, value in (("--gpus-per-node", args.gpus_per_node), ("--processes-per-node", args.processes)):
        if value is not None and value < (name == "--processes-per-node"):
            raise ConfigError(f"{name} {value}: there is no such number of them")
    if args.gpu is not None and args.gpus_per_node == 0:
        raise ConfigError(f"--gpu {args.gpu} with --gpus-per-node 0: drop one of them")
    gpus = args.gpus_per_node if args.gpus_per_node is not None else (args.processes or 8 if args.gpu else 0)
    slots = min((host.slots for host in hosts if host.slots is not None), default=1)
    processes = args.processes or gpus or slots
    if gpus and processes > gpus:
        raise ConfigError(f"{processes} ranks on {gpus} GPUs: each rank has a GPU of its own")
    return Machines(least, most, processes, gpus)


def _environment(words: list[str], target: str) -> dict[str, str]:
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given or not name.isidentifier() or not name.isascii():
            raise ConfigError(f"--env {word} is not NAME=VALUE")
        refuse_taken("--env", name, target)
        if is_secret_variable(name) or holds_secret(value):
            raise ConfigError(
                f"--env {name}: secrets go by reference, never by value, into what is submitted; "
                f"{SECRETS_BY[target].format(name=name)}"
            )
        found[name] = value
    return found


def _run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="its run folder (run.dir)")


def _describe_logs(parser: argparse.ArgumentParser) -> None:
    _run_folder(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="until it ends")
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank alone (hosts, slurm, local)")


def _describe_stop(parser: argparse.ArgumentParser) -> None:
    _run_folder(parser)
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait so long until it has ended")


def status(args: argparse.Namespace) -> int:
    """How it is doing; 0 while it waits or runs, or when it is done."""
    record, target = _launched(args.run)
    found = target.status(record)
    print(f"{record['name']} on {record['target']}: {found.state}" + (f" ({found.detail})" if found.detail else ""))
    if step := RunFolder(args.run).last_recorded_step():
        print(f"  step {step}; meshwright watch {shlex.quote(str(args.run))} shows more")
    return int(found.state in ("failed", "lost"))


def logs(args: argparse.Namespace) -> int:
    """Its output; 0."""
    record, target = _launched(args.run)
    if args.rank is None:
        lines = target.logs(record, args.follow)
    else:
        file = rank_file(record, args.rank, expected=args.follow)
        lines = lines_of([file], lambda: args.follow and target.status(record).state in ("waiting", "running"))
    for line in lines:
        print(line, flush=True)
    return 0


def stop(args: argparse.Namespace) -> int:
    """Ask it to save and end; 0 once it was asked, or has ended within --wait."""
    record, target = _launched(args.run)
    print(target.stop(record), flush=True)
    deadline = time.monotonic() + args.wait
    while args.wait:
        found = target.status(record)
        if found.state not in ("waiting", "running"):
            print(f"{found.state} ({found.detail})")
            break
        if time.monotonic() > deadline:
            raise UserError(f"{record['name']} has not ended within {args.wait:g} s; it may still be saving")
        time.sleep(0.5)
    return 0


ACTIONS = {
    "status": Action("how a launched run is doing", _run_folder, status),
    "logs": Action("its output", _describe_logs, logs),
    "stop": Action("ask it to save and end", _describe_stop, stop),
}
