"""Reads a machine's IP interfaces: kind, speed, addresses, which has the default route. No torch."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.cluster.hardware import NetInterface, NumaNode
from meshwright.cluster.processors import numa_of
from meshwright.cluster.tree import Tree

_ETHER, _INFINIBAND, _LOOPBACK = 1, 32, 772
"""Types of links, as the kernel counts them (ARPHRD_*)."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d")
_DEVTYPES = {"wlan": "wireless", "vlan": "vlan", "bridge": "bridge", "bond": "bond"}


class Route(NamedTuple):
    """A line of the kernel's table."""

    interface: str
    network: ipaddress.IPv4Network
    direct: bool
    metric: int


def read_interfaces(tree: Tree, nodes: Sequence[NumaNode] = ()) -> tuple[NetInterface, ...]:
    """All of them, by name."""
    routes = _routes(tree.text("proc/net/route") or "")
    defaults = sorted((route for route in routes if route.network.prefixlen == 0), key=lambda route: route.metric)
    default = defaults[0].interface if defaults else ""
    names = [name for name in tree.names("sys/class/net") if tree.has(f"sys/class/net/{name}/type")]
    addresses = _addresses(tree, routes, default)
    return tuple(_interface(tree, name, tuple(addresses.get(name, ())), name == default, nodes) for name in names)


def _interface(
    tree: Tree, name: str, addresses: tuple[str, ...], default: bool, nodes: Sequence[NumaNode]
) -> NetInterface:
    folder = f"sys/class/net/{name}"
    speed = tree.number(f"{folder}/speed")
    address = _pci_address(tree, folder)
    members = tuple((tree.text(f"{folder}/bonding/slaves") or "").split())
    return NetInterface(
        name,
        _kind(tree, folder),
        tree.text(f"{folder}/operstate") or "unknown",
        speed if speed is not None and speed > 0 else None,
        addresses,
        default,
        numa=numa_of(tree, f"sys/bus/pci/devices/{address}", nodes) if address else None,
        address=address,
        vendor=tree.text(f"{folder}/device/vendor") or "",
        driver=tree.link_name(f"{folder}/device/driver"),
        members=members,
    )


def _pci_address(tree: Tree, folder: str) -> str:
    """The last PCIe address on the way to the device; a virtio card hangs below one."""
    if not tree.has(f"{folder}/device"):
        return ""
    parts = reversed(tree.real(f"{folder}/device").parts)
    return next((part for part in parts if _PCI_ADDRESS.fullmatch(part)), "")


def _kind(tree: Tree, folder: str) -> str:
    link = tree.number(f"{folder}/type")
    if link == _LOOPBACK:
        return "loopback"
    if link == _INFINIBAND:
        return "infiniband"
    devtype = re.search(r"^DEVTYPE=(\w+)", tree.text(f"{folder}/uevent") or "", re.MULTILINE)
    if devtype and devtype[1] in _DEVTYPES:
        return _DEVTYPES[devtype[1]]
    for sign, kind in (("bonding", "bond"), ("bridge", "bridge"), ("tun_flags", "tunnel")):
        if tree.has(f"{folder}/{sign}"):
            return kind
    if link != _ETHER:
        return "tunnel"
    return "ethernet" if tree.has(f"{folder}/device") else "virtual"


def _routes(table: str) -> list[Route]:
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        try:
            name, target, gateway, _, _, _, metric, mask = words[:8]
            network = ipaddress.IPv4Network((_little(target), str(_little(mask))), strict=False)
            found.append(Route(name, network, int(gateway, 16) == 0, int(metric)))
        except ValueError:
            continue
    return found


def _little(text: str) -> ipaddress.IPv4Address:
    """As the kernel writes addresses: hexadecimal, the first byte last."""
    return ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(text)[::-1], "big"))


def _addresses(tree: Tree, routes: Sequence[Route], default: str) -> dict[str, list[str]]:
    """By interface. The kernel lists its own IPv4 addresses without interfaces: the nearest direct route has them."""
    found: dict[str, list[str]] = {}
    own = re.findall(r"\|-- (\S+)\s+/32 host LOCAL", tree.text("proc/net/fib_trie") or "")
    for text in dict.fromkeys(own):
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            continue
        direct = [route for route in routes if route.direct and address in route.network]
        if address.is_loopback:
            name = "lo"
        elif direct:
            name = max(direct, key=lambda route: (route.network.prefixlen, -route.metric)).interface
        else:
            name = default
        found.setdefault(name, []).append(text)
    for line in (tree.text("proc/net/if_inet6") or "").splitlines():
        words = line.split()
        if len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]):
            found.setdefault(words[5], []).append(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    return found
