"""Settings of interfaces and RDMA ports, held against those that there are. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from meshwright.cluster.hardware import (
    ETHERNET,
    ROCE_V2,
    Hardware,
    NetInterface,
    RdmaPort,
    interface_rate,
    rates,
)
from meshwright.comm.nccl_choices import allowed_fabric, best_interfaces, lost_after
from meshwright.comm.nccl_profile import Finding, Level
from meshwright.comm.nccl_selection import Names, best_gid, fabric_ports, rdma_ports, socket_interfaces
from meshwright.comm.nccl_variables import is_whole_number, number_in
from meshwright.errors import nearest

_MOST_TIMEOUT = 31
"""Larger ones, and 0, never end, as NCCL's documentation says."""
_SHORT_TIMEOUT = 18
"""Below it a link that is trained anew, which takes seconds, ends the run."""

_NETWORKS = {"ib": "IB", "socket": "Socket"}
"""Its own; others come with plugins."""


def check_network(hardware: Hardware, values: Mapping[str, str], machines: int) -> Iterator[Finding]:
    """What is wrong with them."""
    yield from _sockets(hardware, values, machines)
    yield from _gloo(hardware, values, machines)
    if machines > 1:
        yield from _transport(hardware, values)
        yield from _ports(hardware, values)
        yield from _gid(hardware, values)
        yield from _patience(hardware, values)


def _speed(interfaces: Sequence[NetInterface]) -> str:
    if not interfaces:
        return "no interface at all"
    by_rate = Counter(interface_rate(one) for one in sorted(interfaces, key=lambda one: -(one.mbit_s or 0)))
    names = ", ".join(one.name for one in interfaces[:3]) + (" and more" if len(interfaces) > 3 else "")
    return f"{' + '.join(f'{count} x {rate}' for rate, count in by_rate.items())} ({names})"


def instead_of_rdma(hardware: Hardware, values: Mapping[str, str]) -> str:
    """What is lost when sockets take the place of RDMA."""
    used = socket_interfaces(hardware, values.get("NCCL_SOCKET_IFNAME"))
    fabric = fabric_ports(hardware)
    text = f"all traffic between machines goes over sockets, {_speed(used)}, instead of {rates(fabric)}"
    total, slow = sum(port.gbit_s for port in fabric), sum(one.mbit_s or 0 for one in used) / 1000
    if 0 < slow < total:
        return f"{text}: {total / slow:.0f} times slower at best"
    return f"{text}: through the kernel and host memory, at a fraction of that"


def _sockets(hardware: Hardware, values: Mapping[str, str], machines: int) -> Iterator[Finding]:
    name = "NCCL_SOCKET_IFNAME"
    value = values.get(name)
    if value is None:
        return
    if len(value) < 2:
        yield Finding(Level.WARNING, name, f"'{value}' is too short, and NCCL ignores it")
        return
    used = socket_interfaces(hardware, value)
    present = [one.name for one in hardware.interfaces]
    missing = [entry for entry in Names(value).unmatched((one, None) for one in present) if not Names(value).inverted]
    if not used:
        yield _no_interface(hardware, value, missing)
        return
    for entry in missing:
        hint = " (only the first name may have `=` before it; it counts for all)" if entry.startswith("=") else ""
        text = f"no interface is called {entry}{nearest(entry, present)}{hint}"
        yield Finding(Level.WARNING, name, text, cost="that part has no effect")
    if machines > 1 and all(one.kind == "loopback" for one in used):
        cost = "ranks of different machines cannot reach each other: the run waits, and fails"
        yield Finding(Level.BREAKS, name, "it leaves only the loopback interface", cost, _better(hardware, values))
        return
    inner = [one.name for one in used if one.kind in ("bridge", "virtual", "tunnel")]
    if machines > 1 and inner:
        cost = "other machines cannot reach such addresses, or only through a slow detour"
        yield Finding(Level.WARNING, name, f"it takes {', '.join(inner)}, made by containers or tunnels", cost)
    usable = [one for one in hardware.interfaces if one.usable and one.mbit_s]
    fastest = max(usable, key=lambda one: one.mbit_s or 0, default=None)
    if machines > 1 and fastest is not None and not fabric_ports(hardware):
        best = max((one.mbit_s or 0 for one in used), default=0)
        if best and best < (fastest.mbit_s or 0):
            cost = f"all traffic goes over {_speed(used)} instead of {fastest.name}'s {interface_rate(fastest)}"
            yield Finding(Level.WARNING, name, "there is a faster interface", cost, _better(hardware, values))


def _no_interface(hardware: Hardware, value: str, missing: list[str]) -> Finding:
    there = [one.name for one in hardware.interfaces if one.up and one.addresses]
    down = [one for one in hardware.interfaces if Names(value).takes(one.name)]
    if down:
        state = "is down" if not down[0].up else "has no address"
        text = f"{down[0].name} {state}"
    elif missing:
        text = f"there is no interface {missing[0]}{nearest(missing[0], there)}"
    else:
        text = "it leaves no interface"
    cost = "NCCL fails when the first group of ranks is made: no socket interface found"
    return Finding(Level.BREAKS, "NCCL_SOCKET_IFNAME", text, cost, f"there are {', '.join(there) or 'none'}")


def _better(hardware: Hardware, values: Mapping[str, str]) -> str:
    best = best_interfaces(hardware, allowed_fabric(hardware, values))
    return f"={best[0].name} is there, {interface_rate(best[0])}" if best else ""


def _gloo(hardware: Hardware, values: Mapping[str, str], machines: int) -> Iterator[Finding]:
    name = "GLOO_SOCKET_IFNAME"
    value = values.get(name)
    if not value:
        return
    present = [one.name for one in hardware.interfaces]
    named = value.split(",")
    unknown = [one for one in named if one not in present]
    if unknown:
        signs = "; gloo takes plain names, without ^ and =" if value[0] in "^=" else ""
        text = f"there is no interface {unknown[0]}{nearest(unknown[0], present)}{signs}"
        yield Finding(Level.BREAKS, name, text, "gloo fails when ranks meet", f"there are {', '.join(present)}")
        return
    found = [one for text in named if (one := hardware.interface(text)) is not None]
    if not all(one.up and one.addresses for one in found):
        bad = next(one for one in found if not (one.up and one.addresses))
        state = "is down" if not bad.up else "has no address"
        yield Finding(Level.BREAKS, name, f"{bad.name} {state}", "gloo fails when ranks meet")
    elif machines > 1 and all(one.kind == "loopback" for one in found):
        cost = "ranks of different machines cannot reach each other: the run waits, and fails"
        yield Finding(Level.BREAKS, name, "it is the loopback interface", cost, _better(hardware, values))
    setting = values.get("NCCL_SOCKET_IFNAME")
    used = socket_interfaces(hardware, setting) if setting is not None else []
    if used and not {one.name for one in used} & set(named):
        text = f"gloo is on {value} and NCCL on {', '.join(one.name for one in used)}"
        yield Finding(Level.NOTE, name, text, "two networks have to work between the machines")


def _transport(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    fabric = fabric_ports(hardware)
    disabled = number_in(values.get("NCCL_IB_DISABLE", "")) == 1
    network = values.get("NCCL_NET", "").lower()
    if fabric and disabled:
        cost = instead_of_rdma(hardware, values)
        yield Finding(Level.WARNING, "NCCL_IB_DISABLE", "RDMA ports are there and not used", cost, "unset it")
    if fabric and network == "socket":
        yield Finding(Level.WARNING, "NCCL_NET", "RDMA ports are there and not used", instead_of_rdma(hardware, values))
    plugin = "NCCL_NET_PLUGIN" in values or any(port.is_efa for port in hardware.rdma)
    if network not in ("", *_NETWORKS) and not plugin:
        text = f"'{values['NCCL_NET']}' is no network that NCCL has{nearest(values['NCCL_NET'], _NETWORKS.values())}"
        cost = "NCCL fails when the first group of ranks is made, unless a plugin that it finds is called so"
        yield Finding(Level.WARNING, "NCCL_NET", text, cost, f"one of {', '.join(_NETWORKS.values())}, or unset it")
    if network == "ib" and (disabled or not rdma_ports(hardware, values.get("NCCL_IB_HCA"))):
        why = "NCCL_IB_DISABLE forbids it" if disabled else "no RDMA port is active and chosen"
        cost = "NCCL fails when the first group of ranks is made: it may fall back on nothing else"
        yield Finding(Level.BREAKS, "NCCL_NET", f"it asks for IB, and {why}", cost)


def _ports(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    name = "NCCL_IB_HCA"
    value = values.get(name)
    all_ports = [port for port in hardware.rdma if not port.is_efa]
    if value is None or not all_ports:
        return
    names = Names(value)
    used, fabric = rdma_ports(hardware, value), fabric_ports(hardware)
    present = [(port.device, port.port) for port in all_ports]
    for entry in [] if names.inverted else names.unmatched(present):
        hint = " (only the first name may have `=` before it; it counts for all)" if entry.startswith("=") else ""
        ports = sorted({port for device, port in present if names.names(entry, device)})
        if ports:
            text = f"{entry} has no such port; it has {', '.join(map(str, ports))}"
        else:
            text = f"no RDMA device is called {entry}{nearest(entry, [device for device, _ in present])}{hint}"
        yield Finding(Level.WARNING, name, text, "that part has no effect")
    for port in all_ports:
        if not port.active and not names.inverted and names.takes(port.device, port.port):
            yield Finding(Level.WARNING, name, f"{port.name} is {port.state}", "it carries nothing")
    if not used:
        cost = instead_of_rdma(hardware, values) if fabric else "sockets carry all traffic between machines"
        yield Finding(Level.WARNING, name, "it leaves no active port", cost, _all_ports(fabric))
        return
    if not names.exact and not names.inverted:
        yield from _prefixes(names, used)
    total, most = sum(port.gbit_s for port in used), sum(port.gbit_s for port in fabric)
    if total < most:
        cost = f"{rates(used)} instead of {rates(fabric)}: {most / total:.1f} times slower at best between machines"
        yield Finding(Level.WARNING, name, "ports of the compute fabric are left out", cost, _all_ports(fabric))
    mixed = {port.link_layer for port in used}
    if len(mixed) > 1:
        text = f"it takes {' and '.join(sorted(mixed))} ports together"
        yield Finding(Level.WARNING, name, text, "they are two networks, and ranks on one do not reach the other")


def _prefixes(names: Names, used: Sequence[RdmaPort]) -> Iterator[Finding]:
    for entry, _ in names.entries:
        longer = [port.device for port in used if port.device.startswith(entry) and port.device != entry]
        if longer and any(port.device == entry for port in used):
            text = f"{entry} is a prefix, and takes {', '.join(longer)} too"
            yield Finding(Level.WARNING, "NCCL_IB_HCA", text, "more ports than were meant", "put = before the list")


def _all_ports(fabric: Sequence[RdmaPort]) -> str:
    return f"={','.join(port.device for port in fabric)}" if fabric else ""


def _gid(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    name = "NCCL_IB_GID_INDEX"
    if not is_whole_number(values.get(name, "")) or (index := number_in(values[name])) < 0:
        return
    used = rdma_ports(hardware, values.get("NCCL_IB_HCA"))
    ports = [port for port in used if port.link_layer == ETHERNET]
    if not ports:
        if used:
            yield Finding(Level.NOTE, name, "all ports are InfiniBand, where NCCL does not look at it")
        return
    tables = {port: {gid.index: gid for gid in port.gids} for port in ports}
    lacking = [port for port in ports if index not in tables[port]]
    if lacking:
        port = lacking[0]
        there = ", ".join(str(one) for one in sorted(tables[port])) or "none"
        best = best_gid(port)
        text = f"{port.name} has no address at index {index}; it has {there}"
        remedy = "" if best is None else f"{best.index} is {best.kind}, {best.ipv4 or best.value}; or unset it"
        yield Finding(Level.BREAKS, name, text, "connections between machines fail", remedy)
        return
    chosen = {port: tables[port][index] for port in ports}
    old = [port for port, gid in chosen.items() if gid.kind != ROCE_V2]
    if old:
        cost = "no router passes it on, and switches cannot mark or balance it: slow, or no connection"
        text = f"index {index} of {old[0].name} is {chosen[old[0]].kind}"
        yield Finding(Level.WARNING, name, text, cost, "unset it: NCCL finds RoCE v2 by itself")
    elif any(gid.link_local for gid in chosen.values()):
        text = f"index {index} is a link-local address"
        yield Finding(Level.WARNING, name, text, "it reaches no machine behind a router", "unset it")


def _patience(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    if not rdma_ports(hardware, None):
        return
    # An empty value counts as none.
    asked, tried = values.get("NCCL_IB_TIMEOUT") or "20", values.get("NCCL_IB_RETRY_CNT") or "7"
    timeout, tries = (number_in(asked), number_in(tried))
    if not 1 <= timeout <= _MOST_TIMEOUT:
        text = f"{timeout} is no time that ends" if is_whole_number(asked) else "0, which is no time that ends"
        cost = "a lost link is waited for without end: the run hangs, and no error says where"
        yield Finding(Level.WARNING, "NCCL_IB_TIMEOUT", text, cost, f"unset it, or 1 to {_MOST_TIMEOUT}")
        return
    if not (is_whole_number(asked) and is_whole_number(tried) and 0 <= tries <= 7):
        return
    if timeout < _SHORT_TIMEOUT or tries == 0:
        name = "NCCL_IB_TIMEOUT" if timeout < _SHORT_TIMEOUT else "NCCL_IB_RETRY_CNT"
        text = f"an answer may take {lost_after(timeout, max(1, tries)):.2g} s"
        cost = f"a link that is gone for longer ends the run; the default waits {lost_after(20, 7):.0f} s"
        yield Finding(Level.WARNING, name, text, cost, "unset it")
