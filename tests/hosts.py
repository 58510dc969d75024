"""A cluster in a box: hosts of our own, network namespaces on a bridge, each with an address and a name.

    with Hosts(2) as hosts:
        hosts.limit("a", mbit=200)
        ended = hosts.run_ranks(2, "meshwright", "bench", "comm", "all_reduce")   # two ranks on each host

    with Hosts(4, islands=["ac", "bd"]) as hosts:       # two switches, joined by one cable
        hosts.limit_between(mbit=50)

    with Hosts(2, cards=2) as hosts:                    # two network cards each, of which ranks take turns

Needs root and iproute2, as CI has; the namespaces talk to each other and to nobody else. A host's link can be limited,
cut and put back: limits are the kernel's, on what leaves a host and on what comes to it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import psutil
import pytest

_NUMBERS = count()
_PORTS = count(29500)
"""Of hosts that nobody else is on."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


class Hosts:
    """Some hosts, named a, b, c, ... or as given, on one network."""

    def __init__(
        self,
        names: int | Sequence[str],
        folder: Path | None = None,
        islands: Sequence[Sequence[str]] = (),
        first: bool = False,
        cards: int = 1,
    ) -> None:
        """`islands` are hosts by the switch that they are on: two of them, joined by a cable that can be limited.
        `first`: their processes come before all others of this machine, where it lets them; for what is timed.
        `cards`: network cards of each host, which have switches of their own."""
        self.islands = islands
        self.cards = cards
        self.names = [chr(ord("a") + number) for number in range(names)] if isinstance(names, int) else list(names)
        self.folder = folder
        self._first = first
        self._tag = f"mw{os.getpid()}x{next(_NUMBERS)}"
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or any(shutil.which(program) is None for program in ("ip", "ss", "tc")):
            pytest.skip("network namespaces need root, and ip, ss and tc of iproute2")
        bridge = self.space("net")
        ip("netns", "add", bridge)
        switches = [f"bridge{number}" for number in range(max(1, len(self.islands)))]
        for switch in [*switches, *(f"rail{card}" for card in range(1, self.cards))]:
            ip("-n", bridge, "link", "add", switch, "type", "bridge")
            ip("-n", bridge, "link", "set", switch, "up")
        if self.islands:
            ip("-n", bridge, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
            for end, switch in zip(("cable0", "cable1"), switches, strict=True):
                ip("-n", bridge, "link", "set", end, "master", switch, "up")
        for name in self.names:
            space = self.space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            switch = next((number for number, names in enumerate(self.islands) if name in names), 0)
            for card in range(self.cards):
                own, end = f"eth{card}", self._end(name, card)
                ip("-n", space, "link", "add", own, "type", "veth", "peer", "name", end, "netns", bridge)
                ip("-n", bridge, "link", "set", end, "master", f"rail{card}" if card else switches[switch], "up")
                ip("-n", space, "addr", "add", f"{self.address(name, card)}/24", "dev", own)
                ip("-n", space, "link", "set", own, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                for member in [psutil.Process(process.pid), *family]:
                    with suppress(psutil.NoSuchProcess):
                        member.kill()
            with suppress(ValueError):
                process.communicate()
        for name in [*self.names, "net"]:
            subprocess.run(["ip", "netns", "del", self.space(name)], check=False, capture_output=True)

    def space(self, name: str) -> str:
        """The namespace of a host."""
        return f"{self._tag}-{name}"

    def address(self, name: str, card: int = 0) -> str:
        """Where the others reach it."""
        return f"10.77.{card}.{self.names.index(name) + 1}"

    def _end(self, name: str, card: int) -> str:
        """What a host's card is called on its switch."""
        return f"to-{name}-{card}" if card else f"to-{name}"

    def limit(self, name: str, mbit: float) -> None:
        """Let a host's link, or each of them, carry no more than that, in each direction."""
        for card in range(self.cards):
            for space, device in ((self.space(name), f"eth{card}"), (self.space("net"), self._end(name, card))):
                self._shape(space, device, mbit)

    def limit_between(self, mbit: float) -> None:
        """Let the cable between islands carry no more than that, in each direction."""
        for end in ("cable0", "cable1"):
            self._shape(self.space("net"), end, mbit)

    def _shape(self, space: str, device: str, mbit: float) -> None:
        # With a burst below the size of a large packet the kernel cuts each one up, which takes half a core.
        shape = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "200ms"]
        subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", device, *shape], check=True, capture_output=True)

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        ip("-n", self.space("net"), "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put it back."""
        ip("-n", self.space("net"), "link", "set", f"to-{name}", "up")

    def listeners(self, name: str) -> list[str]:
        """Addresses that anything on a host listens on."""
        words = ["ip", "netns", "exec", self.space(name), "ss", "-Hltn"]
        shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        return [line.split()[3] for line in shown.splitlines()]

    def popen(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python -m WORDS` on a host."""
        return self.start(name, sys.executable, "-m", *words, env=env)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, which has a host name of its own: machines are told apart by it."""
        # The kernel weighs sessions against each other, and processes inside of each.
        first = "echo -15 >/proc/self/autogroup; " if self._first else ""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; {first}exec "$@"', "sh"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space(name), *named, *command],
            cwd=self.folder,
            start_new_session=self._first,
            env=os.environ | {"OMP_NUM_THREADS": "1"} if env is None else env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run_ranks(
        self, each: int, *words: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> list[Ended]:
        """Run `python -m WORDS` as so many ranks on each host, with what torchrun sets; gives all ends."""
        world, port = each * len(self.names), next(_PORTS)
        ranks = []
        for node, name in enumerate(self.names):
            for local in range(each):
                own = {
                    "RANK": node * each + local, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each,
                    "GROUP_RANK": node, "MASTER_ADDR": self.address(self.names[0]), "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": f"eth{local % self.cards}", "OMP_NUM_THREADS": 1,
                }  # fmt: skip
                given = {key: str(value) for key, value in own.items()}
                ranks.append(self.popen(name, *words, env=os.environ | given | (env or {})))
        ends = [(one, *one.communicate(timeout=timeout)) for one in ranks]
        return [Ended(one.returncode, out, err) for one, out, err in ends]
