"""Where the machines of a run meet: a store that none of them hosts, and the state of the meeting in it.

The store is PyTorch's TCPStore in a process of its own, bound to one address (its own would listen on all of them).
The meeting itself is torchelastic's dynamic rendezvous. Two things are different from torchelastic's own state: it is
JSON, so that nothing from the network is unpickled; and no machine's clock is compared with another's: a heartbeat is
a name that changes, and its age is counted by whoever sees it change.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from meshwright.errors import ConfigError, ExitCode
from meshwright.parallel.torch_releases import Store, TCPStore
from meshwright.torch_private import RendezvousMember

RUN = "meshwright/run"
"""Key of the run's name, and of a name of this launch that no other has."""
END = "meshwright/end"
"""Key of how the run ended, once it has."""
LINGER_S = 30.0
"""How long the store stays when the run is over, so that every machine learns of it."""


class StoreError(ConfigError):
    """The store cannot be reached, or is not that of this run."""

    exit_code = ExitCode.PARTITIONED


@dataclass(frozen=True)
class Endpoint:
    """Where the store listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Endpoint:
        """An endpoint from HOST:PORT, [ADDRESS]:PORT or HOST."""
        host, _, port = text.rpartition(":") if ":" in text and not text.endswith("]") else (text, "", "29400")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{flag} {text} is not HOST:PORT, such as 10.0.0.5:29400")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Nodes:
    """Several machines: how many, and where they meet."""

    least: int
    most: int
    endpoint: Endpoint
    run_id: str | None = None
    join_s: float = 600.0
    quarantine_failures: int = 3
    quarantine_window_s: float = 600.0


def listen(endpoint: Endpoint) -> socket.socket:
    """A socket bound to that address and no other."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[
            0
        ]
        place = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if (getattr(place, "ipv4_mapped", None) or place).is_unspecified:
            raise ConfigError(
                f"--listen {endpoint} means every network of this machine; name the address that the nodes use"
            )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {endpoint}: {error.strerror}; choose another port, or 0 for one that is free"
        ) from None
    return listener


def serve(listener: socket.socket, run_id: str) -> TCPStore:
    """The store of a run, on a socket that listens; it lives as long as the object."""
    host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(RUN, json.dumps({"run_id": run_id, "launch": os.urandom(8).hex()}))
    return store


def connect(endpoint: Endpoint, timeout_s: float = 20.0) -> TCPStore:
    """A connection to the store."""
    try:
        return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError:
        raise StoreError(
            f"no store answers at {endpoint}; start it with `meshwright rendezvous --listen {endpoint}` there, "
            "and see that no firewall is between"
        ) from None


def check_run(store: Store, endpoint: Endpoint, run_id: str | None) -> dict[str, str]:
    """The store's run; refuses a store that serves another one, or has served it to its end."""
    try:
        store.wait([RUN], timedelta(seconds=5))
        run: dict[str, str] = json.loads(store.get(RUN))
    except RuntimeError:
        raise StoreError(f"{endpoint} is not a store that `meshwright rendezvous` serves; check --rendezvous") from None
    if run_id is not None and run["run_id"] != run_id:
        raise StoreError(
            f"the store at {endpoint} serves the run '{run['run_id']}', not '{run_id}': an old one, perhaps; "
            f"end it and start `meshwright rendezvous --listen {endpoint} --run-id {run_id}`"
        )
    return run


_Moment = tuple[str, float, datetime]
"""A moment in the state: its name there, when it is by the clock here, and how that was shown to the handler."""


class JsonState:
    """The state of a rendezvous in a store, as torchelastic's handler wants it: `state`, `sync`, `mark_dirty`."""

    def __init__(self, store: Store, key: str, settings: RendezvousSettings, cache_s: float = 0.3) -> None:
        self.state = RendezvousMember.new_state()
        self._store, self._key, self._settings, self._cache_s = store, key, settings, cache_s
        self._text = ""
        self._dirty = False
        self._synced = -1.0
        # Of each machine, when its newest heartbeat was first seen here.
        self._beats: dict[Any, _Moment] = {}
        self._deadline: _Moment | None = None

    def mark_dirty(self) -> None:
        """What the handler has changed is written at the next sync, if nobody else was faster."""
        self._dirty = True

    def sync(self) -> bool | None:
        """Write what was changed, or read; gives whether what was changed is written now."""
        wrote: bool | None = None
        try:
            if self._dirty:
                mine, known = self._encode()
                self._text = self._store.compare_set(self._key, self._text, mine).decode()
                wrote = self._text == mine
                if wrote:
                    self._beats, self._deadline = known
            else:
                if time.monotonic() - self._synced < self._cache_s:
                    return None
                self._text = self._store.compare_set(self._key, "", "").decode()
        except (RuntimeError, ValueError) as error:
            raise RendezvousConnectionError(f"the store is lost: {error}") from error
        self._dirty = False
        self._synced = time.monotonic()
        self.state = self._decode(self._text)
        self._forget_dead()
        return wrote

    def remove(self, node: Any) -> None:
        """Take a machine out, as one that leaves in peace."""
        for _ in range(20):
            self.sync()
            self.state.wait_list.discard(node)
            self.state.redundancy_list.discard(node)
            if node in self.state.participants:
                del self.state.participants[node]
                self._after_removal()
            self.state.last_heartbeats.pop(node, None)
            self.mark_dirty()
            if self.sync():
                return

    def _forget_dead(self) -> None:
        """Take out machines that have not been heard of for too long."""
        limit = (self._settings.keep_alive_interval * self._settings.keep_alive_max_attempt).total_seconds()
        now = time.monotonic()
        dead = [node for node in self.state.last_heartbeats if now - self._beats[node][1] > limit]
        for node in dead:
            del self.state.last_heartbeats[node]
            self.state.wait_list.discard(node)
            self.state.redundancy_list.discard(node)
            if node in self.state.participants:
                del self.state.participants[node]
                self._after_removal()

    def _after_removal(self) -> None:
        state = self.state
        if state.complete:
            if not state.participants:
                state.complete = False
                state.round += 1
        elif len(state.participants) < self._settings.min_nodes:
            state.deadline = None

    def _encode(self) -> tuple[str, tuple[dict[Any, _Moment], _Moment | None]]:
        """The state as text; and the moments that are known once, and only if, that is what the store has."""
        state, now = self.state, datetime.now(UTC)
        beats = {}
        for node, shown in state.last_heartbeats.items():
            known = self._beats.get(node)
            beats[node] = known if known is not None and known[2] == shown else _named(time.monotonic(), shown)
        deadline, left = self._deadline, None
        if state.deadline is None:
            deadline = None
        else:
            left = (state.deadline - now).total_seconds()
            if deadline is None or deadline[2] != state.deadline:
                deadline = _named(time.monotonic() + left, state.deadline)
        text = json.dumps(
            {
                "round": state.round,
                "complete": state.complete,
                "closed": state.closed,
                "deadline": None if deadline is None else [deadline[0], left],
                "participants": [[*_plain(node), rank] for node, rank in state.participants.items()],
                "wait_list": [_plain(node) for node in state.wait_list],
                "redundancy_list": [_plain(node) for node in state.redundancy_list],
                "beats": [[*_plain(node), name] for node, (name, _, _) in beats.items()],
            }
        )
        return text, (beats, deadline)

    def _decode(self, text: str) -> Any:
        state = RendezvousMember.new_state()
        if not text:
            return state
        found = json.loads(text)
        now, moment = datetime.now(UTC), time.monotonic()
        node_of = RendezvousMember.node_of
        state.round, state.complete, state.closed = int(found["round"]), bool(found["complete"]), bool(found["closed"])
        state.participants = {node_of(*words): rank for *words, rank in found["participants"]}
        state.wait_list = {node_of(*words) for words in found["wait_list"]}
        state.redundancy_list = {node_of(*words) for words in found["redundancy_list"]}
        for *words, name in found["beats"]:
            node = node_of(*words)
            known = self._beats.get(node)
            seen = known[1] if known is not None and known[0] == name else moment
            shown = now - timedelta(seconds=moment - seen)
            self._beats[node] = (name, seen, shown)
            state.last_heartbeats[node] = shown
        if found["deadline"] is None:
            self._deadline = None
        else:
            name, left = found["deadline"]
            until = self._deadline[1] if self._deadline is not None and self._deadline[0] == name else moment + left
            state.deadline = now + timedelta(seconds=until - moment)
            self._deadline = (name, until, state.deadline)
        return state


def _named(moment: float, shown: datetime) -> _Moment:
    return os.urandom(6).hex(), moment, shown


def _plain(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def settings_of(run_id: str, least: int, most: int, join_s: float) -> RendezvousSettings:
    """How long machines wait for each other: short, so that a change takes seconds."""
    timeout = RendezvousTimeout(join=timedelta(seconds=join_s), last_call=timedelta(seconds=2))
    return RendezvousSettings(run_id, least, most, timeout, timedelta(seconds=1), keep_alive_max_attempt=4)


def interface_to(endpoint: Endpoint) -> str | None:
    """The name of the network interface that leads to an address; None where that cannot be told."""
    import fcntl
    import struct

    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            mine = probe.getsockname()[0]
            if mine.startswith("127.") or mine == "::1":
                return "lo"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    # SIOCGIFADDR
                    found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(found[20:24]) == mine:
                        return name
    return None
