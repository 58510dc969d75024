"""Which NCCL settings are better than the defaults on some hardware, and why: the fewer the better. No torch.

What NCCL would do by itself is worked out first (nccl_selection.py); where that is right nothing is set, and said so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.cluster.hardware import (
    AMD,
    ETHERNET,
    ROCE_V2,
    Hardware,
    NetInterface,
    RdmaPort,
    interface_rate,
    rates,
)
from meshwright.comm.nccl_levels import FEW_GPUS, Reach, own_gdr_level, own_p2p_level, ways_between_gpus, ways_to_ports
from meshwright.comm.nccl_profile import Left, Setting
from meshwright.comm.nccl_selection import best_gid, fabric_ports, rdma_ports, roce_gid, socket_interfaces
from meshwright.comm.nccl_variables import number_in

LARGE_FABRIC = 128
"""Machines from which NCCL's timeouts for InfiniBand are raised."""
FAST_ETHERNET = 100_000
"""Megabits per second from which one socket is too little."""
_AZURE_TOPOLOGIES = {"A100": "/opt/microsoft/ndv4-topo.xml", "H100": "/opt/microsoft/ndv5-topo.xml"}
_AZURE_TOPOLOGIES["H200"] = _AZURE_TOPOLOGIES["H100"]


@dataclass
class Choices:
    """What is to be set, left, and asked."""

    settings: list[Setting] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    questions: list[Left] = field(default_factory=list)

    def set(self, name: str, value: str, reason: str) -> None:
        """A setting."""
        self.settings.append(Setting(name, value, reason))

    def leave(self, name: str, reason: str) -> None:
        """One that is better left alone."""
        self.left.append(Left(name, reason))

    def ask(self, name: str, reason: str) -> None:
        """One that somebody has to find out."""
        self.questions.append(Left(name, reason))


def choose(hardware: Hardware, values: Mapping[str, str], machines: int) -> Choices:
    """For a run on so many machines of this kind, given what the user has set."""
    choices = Choices()
    if not hardware.gpus:
        choices.leave("NCCL_*", "no NVIDIA GPU was found: ranks talk over gloo, and NCCL has no part in it")
    if machines > 1:
        fabric = allowed_fabric(hardware, values)
        _interfaces(choices, hardware, values, fabric)
        if hardware.gpus:
            _ports(choices, hardware, fabric)
            _roce(choices, fabric)
            _timeouts(choices, fabric, machines)
            _gpu_direct(choices, hardware, values, fabric)
            _sockets(choices, hardware, values, fabric)
    else:
        choices.leave("NCCL_SOCKET_IFNAME", "one machine: Meshwright keeps its ranks on the loopback interface")
    if hardware.gpus:
        _between_gpus(choices, hardware, values)
        _topology(choices, hardware)
        choices.leave("NCCL_BUFFSIZE", "the default of 4 MiB; more costs GPU memory in every channel of every group")
        choices.leave("NCCL_DEBUG", "unset, NCCL prints nothing; WARN tells what was wrong before it fails")
        choices.leave("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3, the default, ends a rank whose collective failed")
        choices.leave("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480, the default; Meshwright's own watchdog reports sooner")
    return choices


def allowed_fabric(hardware: Hardware, values: Mapping[str, str]) -> list[RdmaPort]:
    """Ports for training, unless a setting refuses RDMA."""
    refused = number_in(values.get("NCCL_IB_DISABLE", "")) == 1 or values.get("NCCL_NET", "").lower() == "socket"
    return [] if refused else fabric_ports(hardware)


def best_interfaces(hardware: Hardware, fabric: list[RdmaPort]) -> list[NetInterface]:
    """Where sockets belong: with RDMA only meetings, on the default route; else all traffic, on the fastest ones."""
    usable = [one for one in hardware.interfaces if one.usable]
    route = [one for one in usable if one.default_route]
    if fabric and route:
        return route
    fastest = max((one.mbit_s or 0 for one in usable), default=0)
    best = [one for one in usable if (one.mbit_s or 0) == fastest]
    if fastest == 0 and route:
        return route
    return sorted(best, key=lambda one: not one.default_route)


def _interfaces(choices: Choices, hardware: Hardware, values: Mapping[str, str], fabric: list[RdmaPort]) -> None:
    best = best_interfaces(hardware, fabric)
    if not best:
        return
    names = [one.name for one in best]
    own = [one.name for one in socket_interfaces(hardware, None)]
    purpose = "meetings of ranks; the data go over RDMA" if fabric else f"all traffic: {interface_rate(best[0])}"
    which = "the one with the default route" if best[0].default_route else "the fastest that is up"
    explicit = hardware.gpus and own != names
    if explicit:
        wrong = [name for name in own if name not in names]
        instead = (
            f"NCCL would take {', '.join(wrong[:4])}{' and more' if len(wrong) > 4 else ''}" if wrong else "pinned"
        )
        choices.set("NCCL_SOCKET_IFNAME", f"={','.join(names)}", f"{which}, for {purpose}; {instead} by itself")
    elif hardware.gpus:
        choices.leave("NCCL_SOCKET_IFNAME", f"NCCL takes {', '.join(names)} by itself, for {purpose}")
    if explicit or "NCCL_SOCKET_IFNAME" in values or hardware.loopback_name:
        first = _gloo_interface(hardware, values, best)
        why = "/etc/hosts makes this machine's name a loopback address, and gloo would listen there"
        reason = why if hardware.loopback_name else "gloo, which carries CPU tensors, on the same interface as NCCL"
        choices.set("GLOO_SOCKET_IFNAME", first, reason)


def _gloo_interface(hardware: Hardware, values: Mapping[str, str], best: list[NetInterface]) -> str:
    found = socket_interfaces(hardware, values.get("NCCL_SOCKET_IFNAME"))
    taken = [one.name for one in found if one.kind != "loopback"]
    wanted = "NCCL_SOCKET_IFNAME" in values and bool(taken)
    return taken[0] if wanted and best[0].name not in taken else best[0].name


def _ports(choices: Choices, hardware: Hardware, fabric: list[RdmaPort]) -> None:
    if not fabric:
        return
    others = [port for port in rdma_ports(hardware, None) if port not in fabric]
    if not others:
        choices.leave("NCCL_IB_HCA", f"NCCL takes all {len(fabric)} active ports by itself: {rates(fabric)}")
        return
    several = {port.device for port in hardware.rdma if port.port > 1}
    names = [port.name if port.device in several else port.device for port in fabric]
    slower = [port for port in others if (port.link_layer, port.gbit_s) != (fabric[0].link_layer, fabric[0].gbit_s)]
    listed = ", ".join(port.device for port in others)
    why = "slower or of another kind" if slower else "not beside any GPU: storage or management"
    choices.set(
        "NCCL_IB_HCA",
        f"={','.join(names)}",
        f"the {rates(fabric)} of the compute fabric; NCCL would also use {listed}, {why}",
    )


def _roce(choices: Choices, fabric: list[RdmaPort]) -> None:
    ports = [port for port in fabric if port.link_layer == ETHERNET]
    if not ports:
        if fabric:
            choices.leave("NCCL_IB_GID_INDEX", "for RoCE; on InfiniBand NCCL finds the right address")
        return
    own = {port.name: roce_gid(port) for port in ports}
    best = {port.name: best_gid(port) for port in ports}
    indices = {gid.index for gid in best.values() if gid is not None}
    if all(gid is not None and gid.kind == ROCE_V2 and gid.ipv4 for gid in own.values()):
        shown = ", ".join(str(index) for index in sorted({gid.index for gid in own.values() if gid}))
        choices.leave("NCCL_IB_GID_INDEX", f"NCCL finds the RoCE v2 address with IPv4 by itself: index {shown}")
    elif len(indices) == 1 and None not in best.values():
        index = indices.pop()
        gid = next(gid for gid in best.values() if gid is not None)
        taken = next(iter(own.values()))
        other = "none" if taken is None else f"{taken.index} ({taken.kind})"
        where = f"RoCE v2, {gid.ipv4 or gid.value}"
        choices.set("NCCL_IB_GID_INDEX", str(index), f"{where} on all {len(ports)} ports; NCCL would take {other}")
    choices.ask(
        "NCCL_IB_TC",
        "RoCE loses packets, and speed with them, unless switches give its traffic class a lossless queue: ask which "
        "one (often 106, that is DSCP 26); the default is 0, the queue of all other traffic",
    )


def _timeouts(choices: Choices, fabric: list[RdmaPort], machines: int) -> None:
    if not fabric:
        return
    if machines >= LARGE_FABRIC:
        choices.set(
            "NCCL_IB_TIMEOUT",
            "22",
            f"{machines} machines: a lost link is given {lost_after(22, 7):.0f} s to come back before the run fails, "
            f"instead of {lost_after(20, 7):.0f} s",
        )
    else:
        text = f"20, with 7 tries: a lost link may come back within {lost_after(20, 7):.0f} s"
        choices.leave("NCCL_IB_TIMEOUT", text)
    choices.leave("NCCL_CROSS_NIC", "2, the default: NCCL decides by what it finds")


def lost_after(timeout: int, tries: int) -> float:
    """Seconds that an RDMA connection goes without an answer before it fails; the protocol's own formula."""
    return float(4.096e-6 * 2**timeout * tries)


def _gpu_direct(choices: Choices, hardware: Hardware, values: Mapping[str, str], fabric: list[RdmaPort]) -> None:
    if not fabric:
        return
    reaches = [way.reach for way in ways_to_ports(hardware, fabric)]
    if not reaches:
        return
    farthest = max(reaches)
    if farthest <= Reach.PXB:
        choices.leave("NCCL_NET_GDR_LEVEL", "every port shares a PCIe switch with a GPU, so NCCL uses GPUDirect")
    elif farthest <= own_gdr_level(values):
        text = "GPUs reach the processor, and the ports on it, by NVLink-C2C, so NCCL uses GPUDirect"
        choices.leave("NCCL_NET_GDR_LEVEL", text)
    else:
        choices.ask(
            "NCCL_NET_GDR_LEVEL",
            f"the nearest GPU of a port is at {farthest.name}, and NCCL's limit is PXB: data go through host "
            f"memory. Try {farthest.name} and keep it if `meshwright bench comm` is faster with it",
        )


def _sockets(choices: Choices, hardware: Hardware, values: Mapping[str, str], fabric: list[RdmaPort]) -> None:
    if fabric or any(port.is_efa for port in hardware.rdma):
        return
    own = values.get("NCCL_SOCKET_IFNAME")
    used = best_interfaces(hardware, []) if own is None else socket_interfaces(hardware, own)
    names = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    if not used:
        return
    if used[0].vendor in ("0x1d0f", "0x1ae0"):
        choices.leave(names[0], "NCCL knows this cloud's card and opens several sockets by itself")
    elif (used[0].mbit_s or 0) >= FAST_ETHERNET:
        one = f"without RDMA one socket does not fill {interface_rate(used[0])}; 4 x 4 is what NVIDIA names for 100G"
        choices.set(names[0], "4", f"{one}, for some CPU time")
        choices.set(names[1], "4", f"sockets of each of these threads; at most 64 in all, and {used[0].name} has 16")
    elif used[0].mbit_s is None:
        reason = f"the driver does not tell the speed of {used[0].name}; from 100 Gb/s try 4, with 4 "
        choices.ask(names[0], f"{reason}NCCL_NSOCKS_PERTHREAD, and measure")
    else:
        choices.leave(names[0], f"one socket fills {interface_rate(used[0])}")


def _between_gpus(choices: Choices, hardware: Hardware, values: Mapping[str, str]) -> None:
    ways = ways_between_gpus(hardware, values)
    if not ways:
        return
    name, far = "NCCL_P2P_LEVEL", [way.reach for way in ways if way.reach > Reach.PXB]
    if not far:
        near = max(way.reach for way in ways) <= Reach.NVB
        choices.leave(name, f"{'NVLinks' if near else 'PCIe switches'} join all GPUs, and NCCL uses them")
        return
    own, nearest = own_p2p_level(hardware), min(far).name
    joined = f"up to {FEW_GPUS} GPUs of a machine it joins directly by itself"
    if own is Reach.SYS:
        text = (
            f"the processor is AMD's, with which NCCL joins up to {FEW_GPUS} GPUs directly by itself: here at {nearest}"
        )
        choices.leave(name, text)
        return
    where, advice = "NCCL copies through host memory there", f"Try {nearest}"
    if own is None:
        where += f", unless the processor is AMD's, which is not known here: then {joined}, and nothing is to be set"
        advice = f"Else try {nearest}"
    elif hardware.processor_maker == AMD:
        where += f"; in groups of {joined}, as the processor is AMD's"
    elif not hardware.processor_maker:
        where += f"; in groups of {joined}, if the processor is AMD's, which is not known here"
    unseen = ", unless NVLinks join them, which NVML did not tell" if hardware.nvml else ""
    choices.ask(
        name,
        f"some GPUs reach each other only through a processor ({nearest}){unseen}, and {where}. {advice} and keep it "
        "if `meshwright bench comm` is faster and its results are right",
    )


def _topology(choices: Choices, hardware: Hardware) -> None:
    if "/var/run/nvidia-topologyd/virtualTopology.xml" in hardware.files:
        choices.leave("NCCL_TOPO_FILE", "NCCL reads /var/run/nvidia-topologyd/virtualTopology.xml by itself")
        return
    if not hardware.virtual:
        choices.leave("NCCL_TOPO_FILE", "NCCL reads this machine's PCIe tree, which is the real one")
        return
    if hardware.maker == "Microsoft Corporation":
        for model, path in _AZURE_TOPOLOGIES.items():
            if path in hardware.files and any(model in gpu.name for gpu in hardware.gpus):
                choices.set("NCCL_TOPO_FILE", path, "Azure's machines hide which GPU and card share a PCIe switch")
                return
