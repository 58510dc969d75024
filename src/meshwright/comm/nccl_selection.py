"""What NCCL would choose on a machine, after its source: interfaces, RDMA ports, addresses of RoCE. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from meshwright.cluster.hardware import ETHERNET, ROCE_V2, Gid, Hardware, NetInterface, RdmaPort


class Names:
    """A list as NCCL_SOCKET_IFNAME and NCCL_IB_HCA have it: prefixes; after `=` whole names, after `^` all others."""

    def __init__(self, text: str) -> None:
        self.inverted = text.startswith("^")
        text = text.removeprefix("^")
        self.exact = text.startswith("=")
        # NCCL takes the sign once, before the list; another one further on is a part of a name.
        text = text.removeprefix("=")
        parts = [part.split(":") for part in text.split(",")]
        self.entries = [(part[0], _port(part[1:])) for part in parts if part[0]]

    def takes(self, name: str, port: int | None = None) -> bool:
        """Whether a device is among them."""
        if not self.entries:
            return not self.inverted
        found = any(self._is(entry, name, port) for entry in self.entries)
        return found != self.inverted

    def unmatched(self, present: Iterable[tuple[str, int | None]]) -> list[str]:
        """Entries that no device answers to."""
        devices = list(present)
        return [entry[0] for entry in self.entries if not any(self._is(entry, *device) for device in devices)]

    def names(self, wanted: str, name: str) -> bool:
        """Whether an entry stands for a device, whatever its port."""
        return name == wanted if self.exact else name.startswith(wanted)

    def _is(self, entry: tuple[str, int | None], name: str, port: int | None) -> bool:
        wanted, number = entry
        return self.names(wanted, name) and (number is None or port is None or number == port)


def _port(rest: Sequence[str]) -> int | None:
    """By C's atoi, with which what is no number is 0, a port that no device has; none or -1 are all ports."""
    if not rest or not rest[0]:
        return None
    found = re.match(r"\s*([+-]?[0-9]+)", rest[0])
    number = int(found[1]) if found else 0
    return None if number == -1 else number


def socket_interfaces(hardware: Hardware, setting: str | None) -> list[NetInterface]:
    """Interfaces that NCCL's sockets use: all that the setting takes, or NCCL's own choice without one."""
    running = [one for one in hardware.interfaces if one.up and one.addresses]

    def taken(names: str) -> list[NetInterface]:
        chosen = Names(names)
        return [one for one in running if chosen.takes(one.name)]

    if setting is not None and len(setting) > 1:
        return taken(setting)
    for names in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        if found := taken(names):
            return found
    return []


def rdma_ports(hardware: Hardware, setting: str | None) -> list[RdmaPort]:
    """Ports that NCCL's own RDMA transport uses: active ones of InfiniBand and RoCE that the setting takes."""
    names = Names(setting or "")
    return [port for port in hardware.rdma if port.active and not port.is_efa and names.takes(port.device, port.port)]


def fabric_ports(hardware: Hardware) -> list[RdmaPort]:
    """Ports that training should use: the kind and rate that add up to most, and of those the ones beside GPUs.

    Machines have further ports for storage and management, often of the same make, and NCCL would use them too.
    """
    usable = rdma_ports(hardware, None)
    if not usable:
        return []
    groups: dict[tuple[str, float], list[RdmaPort]] = {}
    for port in usable:
        groups.setdefault((port.link_layer, port.gbit_s), []).append(port)
    most = max(groups.values(), key=lambda ports: (sum(port.gbit_s for port in ports), ports[0].link_layer != ETHERNET))
    distances = {port: hardware.nearest_gpu(port.address) for port in most}
    near = [port for port, found in distances.items() if found is not None and found[1].name in ("PIX", "PXB")]
    return near or most


def roce_gid(port: RdmaPort) -> Gid | None:
    """The address that NCCL takes for a RoCE port when none is set: IPv4 before IPv6, and RoCE v2 before v1."""
    if not port.gids:
        return None
    chosen = port.gids[0]
    for gid in port.gids[1:]:
        if gid.ipv4 is None or gid.link_local:
            continue
        if chosen.ipv4 is None or (gid.kind != chosen.kind and gid.kind == ROCE_V2):
            chosen = gid
    return chosen


def best_gid(port: RdmaPort) -> Gid | None:
    """The first RoCE v2 address with IPv4, which routers and switches with ECN can handle; else the first RoCE v2."""
    wanted: tuple[Callable[[Gid], bool], ...] = (
        lambda gid: gid.kind == ROCE_V2 and gid.ipv4 is not None,
        lambda gid: gid.kind == ROCE_V2 and not gid.link_local,
        lambda gid: gid.kind == ROCE_V2,
    )
    for test in wanted:
        if found := next((gid for gid in port.gids if test(gid)), None):
            return found
    return None
