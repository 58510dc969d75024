"""Hosts that ssh reaches as a target: one of them serves the store, each trains in the background. No torch.

The run folder and the data must be where all hosts see them under the same path, as must Python with the same
Meshwright in it. What runs on a host is started by `meshwright.launch.detached` there, so that nothing depends on this
terminal, and is looked at and stopped through it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from meshwright._version import __version__
from meshwright.elastic.rank_log import RANK_LOGS
from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.launch.hostfile import Host, parse_hosts, read_hostfile
from meshwright.launch.remote import SSH, Remote, RemoteError
from meshwright.launch.submission import RUN_FILE, Submission
from meshwright.launch.target import Status, launch_folder

IDLE_S = 300.0
"""The store's process ends when no host was heard of for so long."""
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][\w.-]*)(?::(?P<port>\d{1,5}))?")
HOSTS_FILE, COMMANDS_FILE = "hostfile", "commands.sh"


def describe(group: argparse._ArgumentGroup) -> None:
    """Options of hosts."""
    group.add_argument("--hostfile", type=Path, metavar="FILE", help="lines such as `host slots=8`")
    group.add_argument("--hosts", metavar="A,B", help="the same in short: a,b or a:8,b:8")
    group.add_argument("--ssh", metavar="COMMAND", help=f"how a host is reached (default: {SSH})")
    group.add_argument("--address", metavar="HOST[:PORT]", help="where the first host is reached by the others")


class _Kept(BaseModel):
    hosts: list[str] = Field(min_length=1)
    folder: str
    python: str
    ssh: str


class Hosts:
    """Machines that are reached one by one."""

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """See that all hosts answer, have the same Meshwright, and see the same folders."""
        hosts, way = self._hosts(submission, options), _way(options)
        _address(hosts, options)
        way.on_all([host.name for host in hosts], lambda name: _look(way, name, options))

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """The run file, the plan, the hosts, and the commands in words."""
        hosts, way = self._hosts(submission, options), _way(options)
        slots, folder = submission.machines.processes, str(launch_folder(Path(submission.config.run.dir)))
        listing = "".join(f"{host.name} slots={slots}\n" for host in hosts)
        address = _address(hosts, options, known=False)
        endpoint = re.sub(":0$", ":PORT", address)
        started = [
            (hosts[0], _store(options, address, folder, submission.name)),
            *((host, _node(options, submission, folder, host, endpoint, submission.name)) for host in hosts),
        ]
        told = [
            "# What `meshwright launch` runs, in this order; a PORT is the one that the store prints.",
            *(shlex.join(way.command(host.name, command)) for host, command in started),
        ]
        return {**submission.files(), HOSTS_FILE: listing, COMMANDS_FILE: "\n".join(told) + "\n"}

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Start the store, then every host."""
        hosts, way, where = self._hosts(submission, options), _way(options), str(folder)
        names = [host.name for host in hosts]
        run_id = f"{submission.name}-{os.urandom(4).hex()}"
        record = {"hosts": names, "folder": where, "python": _python(options), "ssh": way.template, "run_id": run_id}
        text = submission.run_file
        # Where the folder is shared this writes the same again.
        put = ["sh", "-c", 'mkdir -p "$0" && cat >"$0/$1"', where, RUN_FILE]
        way.on_all(names, lambda name: way.run(name, put, text))
        way.run(names[0], _store(options, _address(hosts, options), where, run_id))
        try:
            endpoint = _endpoint(way, names[0], f"{where}/{_store_name(run_id)}.log")
            way.on_all(
                names,
                lambda name: way.run(
                    name, _node(options, submission, where, hosts[names.index(name)], endpoint, run_id)
                ),
            )
        except UserError:
            _send(record, [*((name, _file(name)) for name in names), (names[0], _store_name(run_id))])
            raise
        return {**record, "rendezvous": endpoint, "rank_logs": f"{where}/rank"}

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """The hosts, and how they are asked."""
        return _Kept

    def status(self, record: Mapping[str, Any]) -> Status:
        """What the processes of all hosts say."""
        states = _states(record)
        shown = ", ".join(f"{name} {_words(*state)}" for name, state in states.items())
        codes = [code for word, code in states.values() if word == "ended"]
        if any(word == "running" for word, _ in states.values()):
            return Status("running", shown)
        if all(word == "unreachable" for word, _ in states.values()):
            return Status("lost", shown)
        if ExitCode.DONE in codes:
            return Status("finished", shown)
        if codes and all(code == ExitCode.PREEMPTED for code in codes):
            return Status("stopped", f"{shown}; launch it again to go on")
        return Status("failed" if codes else "lost", f"{shown}; `meshwright launch logs` shows why")

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """The output of all hosts."""
        way = Remote(record["ssh"])
        if not follow:
            return way.lines(record["hosts"], lambda name: ["cat", f"{record['folder']}/{_file(name)}.log"])
        look = [record["python"], "-m", "meshwright.launch.detached", "--follow", record["folder"]]
        return way.lines(record["hosts"], lambda name: [*look, _file(name)])

    def stop(self, record: Mapping[str, Any]) -> str:
        """SIGTERM to all of them: they save together and end."""
        asked = _send(record, [(name, _file(name)) for name in record["hosts"]])
        if not asked:
            raise UserError(f"nothing of {record['name']} runs on {', '.join(record['hosts'])} any more")
        return f"asked {', '.join(asked)} to save and end"

    def _hosts(self, submission: Submission, options: argparse.Namespace) -> list[Host]:
        found = hosts_of(options)
        if len(found) < submission.machines.most:
            raise ConfigError(f"--nodes {submission.machines.range}, and there are {len(found)} hosts")
        taken = found[: submission.machines.most]
        for host in taken:
            if host.slots is not None and host.slots < submission.machines.processes:
                raise ConfigError(
                    f"{host.name} has {host.slots} slots, and {submission.machines.processes} ranks are to run there; "
                    "say --processes-per-node, or leave it out"
                )
        return taken


def hosts_of(options: argparse.Namespace) -> list[Host]:
    """The hosts that were named."""
    if (options.hostfile is None) == (options.hosts is None):
        raise ConfigError("--on hosts needs --hostfile FILE or --hosts A,B, one of them")
    return parse_hosts(options.hosts) if options.hosts is not None else read_hostfile(options.hostfile)


def _way(options: argparse.Namespace) -> Remote:
    return Remote(options.ssh or SSH)


def _python(options: argparse.Namespace) -> str:
    return str(options.python or sys.executable)


def _file(host: str) -> str:
    """A host's name as that of its files."""
    return host.replace("/", "_").replace("@", "_")


def _look(way: Remote, name: str, options: argparse.Namespace) -> None:
    """Whether a host can take part."""
    folder = options.workdir or os.getcwd()
    shown = way.run(
        name, ["sh", "-c", 'cd "$0" && exec "$@"', folder, _python(options), "-m", "meshwright", "--version"]
    )
    version = shown.strip().rpartition(" ")[2]
    if version != __version__:
        raise RemoteError(f"{name} has meshwright {version}, and here is {__version__}; they must be the same")


def _address(hosts: Sequence[Host], options: argparse.Namespace, known: bool = True) -> str:
    """Where the store will listen: an address of the first host that the others reach; its name if that will do."""
    if options.address is not None:
        said = _ADDRESS.fullmatch(options.address)
        if said is None or int(said["port"] or 0) > 65535:
            raise ConfigError(
                f"--address {options.address} is not HOST or HOST:PORT, such as 10.0.0.5:29400 or [fd00::5]"
            )
        return f"{said['host']}:{said['port'] or 0}"
    first = hosts[0].address
    try:
        address = str(socket.getaddrinfo(first, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        if not known:
            return f"{first}:0"
        raise ConfigError(f"the address of {first} is not known here; say it with --address") from None
    if len(hosts) > 1 and (address.startswith("127.") or address == "::1"):
        raise ConfigError(f"{first} is {address} here, which no other host reaches; say --address")
    return f"[{address}]:0" if ":" in address else f"{address}:0"


def _started(options: argparse.Namespace, folder: str, name: str, command: Sequence[str]) -> list[str]:
    """What starts a command on a host that goes on there."""
    return _there(options, [_python(options), "-m", "meshwright.launch.detached", folder, name, "--", *command])


def _there(options: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """A command in the folder from which it is launched."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(options.workdir or os.getcwd()), *command]


def _store(options: argparse.Namespace, address: str, folder: str, run_id: str) -> list[str]:
    listen = ["--listen", address, "--run-id", run_id, "--idle", f"{IDLE_S:g}"]
    return _started(options, folder, _store_name(run_id), [_python(options), "-m", "meshwright", "rendezvous", *listen])


def _node(
    options: argparse.Namespace, submission: Submission, folder: str, host: Host, endpoint: str, run_id: str
) -> list[str]:
    given = [f"{RANK_LOGS}={folder}/rank", *(f"{name}={value}" for name, value in submission.environment.items())]
    meeting = ["--nodes", submission.machines.range, "--rendezvous", endpoint, "--run-id", run_id]
    train = submission.train(f"{folder}/{RUN_FILE}")
    command = [_python(options), "-m", "meshwright.launch.node", *meeting, "--", *train]
    return _started(options, folder, _file(host.name), ["env", *given, *command])


def _store_name(run_id: str) -> str:
    """Of the store's files: those of another launch are not taken for it."""
    return f"rendezvous-{run_id}"


def _endpoint(way: Remote, host: str, log: str) -> str:
    """Where the store listens, as it says itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = way.run(host, ["cat", log]).split()
        if "--rendezvous" in words[:-1]:
            return words[words.index("--rendezvous") + 1]
        time.sleep(0.3)
    raise RemoteError(f"the store on {host} has not started; {log} there says why")


def _states(record: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    way = Remote(record["ssh"])
    look = [record["python"], "-m", "meshwright.launch.detached", "--state", record["folder"]]

    def one(name: str) -> tuple[str, int | None]:
        try:
            word, code = json.loads(way.run(name, [*look, _file(name)]))
        except RemoteError:
            return "unreachable", None
        return str(word), code

    return dict(zip(record["hosts"], way.on_all(record["hosts"], one), strict=True))


def _send(record: Mapping[str, Any], processes: Sequence[tuple[str, str]]) -> list[str]:
    """Ask processes to end; gives the hosts on which there was one."""
    way = Remote(record["ssh"])
    send = [record["python"], "-m", "meshwright.launch.detached", "--send", record["folder"]]
    asked = []
    for host, name in processes:
        try:
            if json.loads(way.run(host, [*send, name, str(int(signal.SIGTERM))])):
                asked.append(host)
        except RemoteError as error:
            print(f"meshwright launch: {error}", file=sys.stderr)
    return asked


def _words(word: str, code: int | None) -> str:
    return f"ended with {code}" if word == "ended" else word


TARGET = Hosts()
