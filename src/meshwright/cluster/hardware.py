"""One machine's hardware as data: processors, PCIe, GPUs, network; and how far its parts are from each other.

`sysfs.py` reads it from a machine, or from a recorded tree of one. No torch.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

NVIDIA = "0x10de"
AMD, ARM, IBM = "AuthenticAMD", "ARM", "IBM"
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
ROCE_V1, ROCE_V2 = "RoCE v1", "RoCE v2"
_TWO_LEVELS = (
    ("0x1000:0xc010:0x1000:0xa", "0x1000:0xc010:0x1000:0xa"),
    ("0x1000:0xc030:0x1000:0x0", "0x1000:0xc030:0x1000:0x1"),
)
"""Vendor, device and those of the card, of PCIe switches that show themselves as two levels; after NCCL's source."""


class Distance(IntEnum):
    """How two PCIe devices reach each other, in NCCL's words, from near to far."""

    PIX = 1
    """Over one switch."""
    PXB = 2
    """Over several switches."""
    PHB = 3
    """Through a processor of one NUMA node."""
    SYS = 4
    """From NUMA node to NUMA node."""


@dataclass(frozen=True)
class NumaNode:
    """Processor cores and the memory beside them."""

    index: int
    cpus: str
    """As the kernel lists them: 0-47,96-143."""
    memory_bytes: int
    gpu: str = ""
    """PCIe address of the GPU whose memory it is, if it is that of one, as with POWER9 and Grace."""


@dataclass(frozen=True)
class PciDevice:
    """A device, and the bridges that lead to it."""

    address: str
    vendor: str
    device: str
    kind: int
    """Class and subclass: 0x0302 is a 3D controller, 0x0604 a bridge."""
    numa: int | None
    path: tuple[str, ...]
    """From the root (`pci0000:17`) to the device itself."""
    driver: str = ""
    iommu: str = ""
    """How the IOMMU treats its memory accesses: DMA, DMA-FQ, identity; empty without one."""
    redirects: bool | None = None
    """Of a bridge: whether access control (ACS) sends what goes between its devices up to the processor; None where
    only an administrator can read it."""
    subsystem: str = ""
    """Of a bridge: the card's own vendor and device, `0x1000:0xa096`."""

    @property
    def is_bridge(self) -> bool:
        """Whether other devices are behind it."""
        return self.kind == 0x0604

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU of NVIDIA."""
        return self.vendor == NVIDIA and self.kind in (0x0300, 0x0302)

    @property
    def is_nvswitch(self) -> bool:
        """Whether it switches NVLinks."""
        return self.vendor == NVIDIA and self.kind == 0x0680

    @property
    def is_infiniband(self) -> bool:
        """Whether it is a card of InfiniBand; RoCE's look like any other Ethernet."""
        return self.kind in (0x0207, 0x0C06)

    def takes_in(self, other: PciDevice) -> bool:
        """Whether NCCL takes this switch and the one below it for one: Broadcom's look like two levels of them."""
        own, below = (f"{one.vendor}:{one.device}:{one.subsystem}" for one in (self, other))
        return any(own.startswith(first) and below.startswith(second) for first, second in _TWO_LEVELS)


@dataclass(frozen=True)
class Gpu:
    """A GPU, with what NVML says of it where there is NVML."""

    address: str
    numa: int | None
    index: int | None = None
    """As NVML counts."""
    name: str = ""
    memory_bytes: int | None = None
    links: int = 0
    """NVLinks that are up."""
    link_gb_s: float | None = None
    """Of one of them, one way."""
    switched: bool = False
    """Whether they lead to NVSwitches, and so to all other GPUs that have it so."""
    peers: tuple[str, ...] = ()
    """Addresses of GPUs at the other end of its links."""

    @property
    def label(self) -> str:
        """Short, and the same in everything that is shown."""
        return f"GPU{self.index}" if self.index is not None else f"GPU {self.address}"


@dataclass(frozen=True)
class Gid:
    """An entry of an RDMA port's table of addresses."""

    index: int
    value: str
    kind: str
    """RoCE v1 (also written for InfiniBand) or RoCE v2."""
    netdev: str = ""

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address that it stands for, if it does."""
        try:
            mapped = ipaddress.IPv6Address(self.value).ipv4_mapped
        except ValueError:
            return None
        return None if mapped is None else str(mapped)

    @property
    def link_local(self) -> bool:
        """Whether it reaches no further than a switch's own network."""
        try:
            return ipaddress.IPv6Address(self.value).is_link_local
        except ValueError:
            return False


@dataclass(frozen=True)
class RdmaPort:
    """A port of a network card that reads and writes remote memory: InfiniBand, RoCE, EFA."""

    device: str
    port: int
    link_layer: str
    """InfiniBand or Ethernet; Unspecified or Unknown for EFA."""
    state: str
    """ACTIVE, DOWN, INIT, ARMED."""
    gbit_s: float
    """Gigabits per second, as the port says."""
    gids: tuple[Gid, ...] = ()
    netdev: str = ""
    address: str = ""
    numa: int | None = None
    driver: str = ""

    @property
    def active(self) -> bool:
        """Whether it carries traffic now."""
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA takes it."""
        return f"{self.device}:{self.port}"

    @property
    def is_efa(self) -> bool:
        """Whether it is Amazon's adapter, which NCCL reaches through a plugin only."""
        return self.driver == "efa" or self.link_layer not in (INFINIBAND, ETHERNET)


@dataclass(frozen=True)
class NetInterface:
    """An IP interface."""

    name: str
    kind: str
    """ethernet, infiniband, bond, vlan, bridge, wireless, tunnel, virtual, loopback."""
    state: str
    """up, down, unknown, lowerlayerdown, as the kernel says."""
    mbit_s: int | None = None
    """Megabits per second; None where the driver does not know, as in most virtual machines."""
    addresses: tuple[str, ...] = ()
    default_route: bool = False
    numa: int | None = None
    address: str = ""
    """On the PCIe bus."""
    vendor: str = ""
    driver: str = ""
    members: tuple[str, ...] = ()
    """Interfaces that it is made of."""

    @property
    def up(self) -> bool:
        """Whether it can carry traffic; loopback and some virtual interfaces say no more than `unknown`."""
        return self.state in ("up", "unknown")

    @property
    def usable(self) -> bool:
        """Whether ranks of several machines could meet on it."""
        return self.up and bool(self.addresses) and self.kind in ("ethernet", "infiniband", "bond", "vlan", "wireless")


@dataclass(frozen=True)
class Hardware:
    """All of it, of one machine."""

    host: str
    maker: str = ""
    product: str = ""
    virtual: bool = False
    """Whether it is a virtual machine, which may see another PCIe tree than there is."""
    processor: str = ""
    processor_maker: str = ""
    """As x86 processors say: GenuineIntel, AuthenticAMD; ARM for all of that kind, IBM for POWER; empty where it is not
    known."""
    cpus: int = 0
    """As the kernel counts them: two for each core with hyper-threading."""
    cores: int = 0
    """0 where /proc/cpuinfo does not tell, as on ARM and POWER."""
    memory_bytes: int = 0
    """Of the processors; that of GPUs is not in it."""
    numa: tuple[NumaNode, ...] = ()
    pci: Mapping[str, PciDevice] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    interfaces: tuple[NetInterface, ...] = ()
    gpu_driver: str = ""
    peer_memory: bool = False
    """Whether nvidia_peermem or its forerunner is loaded, through which network cards reach a GPU's memory."""
    open_gpu_driver: bool = False
    """Whether the GPU driver's kernel modules are the open ones, which offer DMA-BUF for the same."""
    kernel: tuple[int, int] = (0, 0)
    nvml: str = ""
    """Why NVML told nothing, where it did not."""
    loopback_name: bool = False
    """Whether /etc/hosts makes this machine's own name a loopback address."""
    files: tuple[str, ...] = ()
    """Files of interest to NCCL that are there: topologies of cloud machines, network plugins."""

    @property
    def nvswitches(self) -> int:
        """Switches of NVLinks that are seen on the bus; in virtual machines they often are not."""
        return sum(device.is_nvswitch for device in self.pci.values())

    @property
    def cards_without_driver(self) -> tuple[str, ...]:
        """Addresses of InfiniBand cards on the bus, where the kernel shows no RDMA device at all."""
        cards = [one for one in self.pci.values() if one.is_infiniband and one.driver != "vfio-pci"]
        return () if self.rdma else tuple(card.address for card in cards)

    def interface(self, name: str) -> NetInterface | None:
        """By its name."""
        return next((one for one in self.interfaces if one.name == name), None)

    def distance(self, one: str, other: str) -> Distance | None:
        """Between two PCIe addresses; None where one of them is not known."""
        if one not in self.pci or other not in self.pci:
            return None
        left, right = self.pci[one], self.pci[other]
        ways = self._switches(left), self._switches(right)
        common = _shared(*ways)
        if common:
            return Distance.PIX if all(len(way) == common for way in ways) else Distance.PXB
        same_node = left.numa == right.numa or None in (left.numa, right.numa)
        return Distance.PHB if left.path[0] == right.path[0] or same_node else Distance.SYS

    def _switches(self, device: PciDevice) -> list[str]:
        """PCIe switches on the way to a device, from the root on, as NCCL counts them: by the port that leads up."""
        # From the device every second step, as a switch has a port up and one down; without the root itself.
        ports = [step for step in device.path[-3::-2] if step != device.path[0]][::-1]
        found: list[str] = []
        taken = False
        for above, port in zip(["", *ports], ports, strict=False):
            # What is taken in takes in nothing itself: NCCL makes one of two levels, not of three.
            both = not taken and above in self.pci and port in self.pci
            taken = both and self.pci[above].takes_in(self.pci[port])
            if not taken:
                found.append(port)
        return found

    def nearest_gpu(self, address: str) -> tuple[Gpu, Distance] | None:
        """The GPU that is nearest to a device."""
        found = [(distance, gpu.address, gpu) for gpu in self.gpus if (distance := self.distance(address, gpu.address))]
        if not found:
            return None
        distance, _, gpu = min(found, key=lambda row: row[:2])
        return gpu, distance

    def linked(self, one: Gpu, other: Gpu) -> bool:
        """Whether NVLinks join two GPUs."""
        return (one.switched and other.switched) or other.address in one.peers or one.address in other.peers

    @property
    def all_linked(self) -> bool:
        """Whether every GPU reaches every other over NVLinks."""
        pairs = [(one, other) for one in self.gpus for other in self.gpus if one.address < other.address]
        return bool(pairs) and all(self.linked(*pair) for pair in pairs)


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """How many steps two paths from the root have in common."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def rates(ports: Sequence[RdmaPort]) -> str:
    """Ports by their rates: `8 x 400 Gb/s`, `4 x 200 + 1 x 25 Gb/s`."""
    by_rate: dict[float, int] = {}
    for port in ports:
        by_rate[port.gbit_s] = by_rate.get(port.gbit_s, 0) + 1
    return " + ".join(f"{count} x {rate:g}" for rate, count in sorted(by_rate.items(), reverse=True)) + " Gb/s"


def interface_rate(interface: NetInterface) -> str:
    """`10 Gb/s`, or that it is not known."""
    return "unknown speed" if interface.mbit_s is None else f"{interface.mbit_s / 1000:g} Gb/s"
