"""One machine of a run, as schedulers start it: meets the others, takes NCCL's settings from its hardware, trains.

    python -m meshwright.launch.node --nodes 2:4 [--rank 0] --rendezvous HOST:PORT --run-id ID -- run.toml --nproc 8

The machine of rank 0 also serves the store where they meet, in a process of its own; HOST is how the others reach it.
Without ranks somebody else serves it.
SIGTERM, SIGINT and SIGUSR1 are a wish to save and end, and are passed on as SIGTERM. The exit code is that of
`meshwright train`; for schedulers that start again on a code of their own, --retry-code gives them that one where
starting again makes sense. Variables of other launchers, which operators set in pods, are taken out of the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

from meshwright.cluster.sysfs import read_hardware
from meshwright.comm.nccl_profile import nccl_profile
from meshwright.comm.nccl_variables import given_settings
from meshwright.errors import ConfigError, ExitCode, UserError

WAIT_S = 600.0
LINGER_S = 5.0
"""How long the store stays when this machine is done: the others end in the same moment, and learn of it within two
seconds. One that does not finds the run finished when it is started again."""
TRAIN = [sys.executable, "-m", "meshwright", "train"]
SERVE = [sys.executable, "-m", "meshwright", "rendezvous"]
AGAIN = (ExitCode.PREEMPTED, ExitCode.PARTITIONED, ExitCode.LOCKED)
"""Exit codes after which starting again makes sense."""
FOREIGN = re.compile(r"PET_\w+|TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
"""Variables by which other launchers tell their ranks who they are; machines of ours find that out by meeting."""


class _Stopped(Exception):
    """A signal came before there was anything to save."""


class Node:
    """The processes of this machine."""

    def __init__(self) -> None:
        self.training: subprocess.Popen[bytes] | None = None
        self.store: subprocess.Popen[bytes] | None = None

    def take_signals(self) -> None:
        """Pass wishes to end on to the training."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        if self.training is None:
            raise _Stopped
        with contextlib.suppress(ProcessLookupError):
            self.training.send_signal(signal.SIGTERM)

    def serve(self, host: str, port: int, run_id: str, deadline: float) -> None:
        """Serve the store on the address that the others know."""
        address = _resolve(host, deadline)
        listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.store = subprocess.Popen([*SERVE, "--listen", listen, "--run-id", run_id])

    def meet(self, host: str, port: int, deadline: float) -> None:
        """Wait until the store answers."""
        while True:
            try:
                socket.create_connection((host, port), timeout=5.0).close()
                return
            except OSError as error:
                trouble = error
            if self.store is not None and self.store.poll() is not None:
                raise ConfigError(f"the store at {host}:{port} did not start (exit code {self.store.returncode})")
            if time.monotonic() > deadline:
                raise _NoStore(f"nothing answers at {host}:{port} ({trouble}); is the machine of rank 0 there?")
            time.sleep(0.5)

    def train(self, arguments: list[str]) -> int:
        """Train to the end; gives the exit code."""
        self.training = subprocess.Popen([*TRAIN, *arguments])
        code = self.training.wait()
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """End the store, once the others have heard how it went."""
        if self.store is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, _Stopped):
            self.store.wait(LINGER_S)
        if self.store.poll() is None:
            self.store.terminate()
            self.store.wait()


class _NoStore(UserError):
    exit_code = ExitCode.PARTITIONED


def _resolve(host: str, deadline: float) -> str:
    """The address of a name; names of machines that have just started may not be known yet."""
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise _NoStore(f"the name {host} is not known here: {error}") from None
            time.sleep(0.5)


def _take_nccl_settings(machines: int) -> None:
    """What this machine's hardware asks for, unless a user said otherwise; but for the interface, which the training
    takes from the way to the store."""
    profile = nccl_profile(read_hardware(), given_settings(os.environ), machines=machines)
    wanted = {name: value for name, value in profile.environment().items() if not name.endswith("SOCKET_IFNAME")}
    for name, value in wanted.items():
        print(f"meshwright: {name}={value}", file=sys.stderr, flush=True)
        os.environ[name] = value


def main(words: list[str] | None = None) -> int:
    """Take part in a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", required=True, metavar="N|MIN:MAX")
    parser.add_argument("--rank", type=int, help="number of this machine")
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="S", help="how long to wait for the store")
    parser.add_argument("--retry-code", type=int, metavar="N", help="exit code that stands for: start again")
    parser.add_argument("train", nargs="+", metavar="ARGUMENT", help="of meshwright train, after --")
    args = parser.parse_args(words)
    host, _, port = args.rendezvous.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + args.wait
    node, code = Node(), int(ExitCode.PREEMPTED)
    for name in filter(FOREIGN.fullmatch, list(os.environ)):
        del os.environ[name]
    node.take_signals()
    try:
        if args.rank == 0:
            node.serve(host, int(port), args.run_id, deadline)
        node.meet(host, int(port), deadline)
        _take_nccl_settings(int(args.nodes.rpartition(":")[2]))
        meeting = ["--nodes", args.nodes, "--rendezvous", args.rendezvous, "--run-id", args.run_id]
        code = node.train([*args.train, *meeting])
        if code == ExitCode.QUARANTINED and node.store is not None:
            # Nobody can go on without the store, which ends with this machine's part.
            print("meshwright: this machine serves the store; the run ends with it", file=sys.stderr)
            code = int(ExitCode.NO_PROGRESS)
    except _Stopped:
        print("meshwright: asked to stop before the training began", file=sys.stderr)
    except UserError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        code = error.exit_code
    finally:
        node.close()
    return code if args.retry_code is None or code not in AGAIN else args.retry_code


if __name__ == "__main__":
    raise SystemExit(main())
