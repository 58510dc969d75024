"""Machines as the kernel shows them: small trees of /sys and /proc, with its links, from short descriptions.

The values are as such machines have them; a path of a device is its place on the PCIe bus.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from meshwright.cluster.hardware import Hardware
from meshwright.cluster.nvml import NvmlGpu
from meshwright.cluster.sysfs import read_hardware

GiB = 2**30
INTEL = ("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480C")
EPYC = ("AuthenticAMD", "AMD EPYC 9554 64-Core Processor")


@dataclass
class Machine:
    """A tree under construction."""

    root: Path
    addresses: list[tuple[str, str]] = field(default_factory=list)
    nvml: tuple[NvmlGpu, ...] | None = None

    def write(self, path: str, text: str | bytes) -> None:
        """A file with one value."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text) if isinstance(text, bytes) else place.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """A relative link, as sysfs makes them; the target need not be there yet."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def system(
        self,
        sockets: int = 1,
        *,
        cores: int = 8,
        gib: int = 64,
        virtual: bool = False,
        maker: str = "",
        processor: tuple[str, str] = INTEL,
    ) -> None:
        """Processors, memory and NUMA nodes."""
        flags = "fpu sse2 hypervisor" if virtual else "fpu sse2"
        one = f"vendor_id\t: {processor[0]}\nmodel name\t: {processor[1]}\nflags\t\t: {flags}\n"
        self.write("proc/cpuinfo", "\n".join(f"processor\t: {core}\n{one}" for core in range(cores)))
        self.write("proc/meminfo", f"MemTotal:       {gib * 2**20} kB")
        self.write("proc/sys/kernel/osrelease", "6.8.0-60-generic")
        self.write("etc/hosts", "127.0.0.1 localhost")
        for node in range(sockets):
            share = cores // sockets
            self.write(f"sys/devices/system/node/node{node}/cpulist", f"{node * share}-{(node + 1) * share - 1}")
            text = f"Node {node} MemTotal:       {gib * 2**20 // sockets} kB"
            self.write(f"sys/devices/system/node/node{node}/meminfo", text)
        if maker:
            self.write("sys/class/dmi/id/sys_vendor", maker)

    def pci(self, path: str, ids: str, kind: str, numa: int, *, driver: str = "", iommu: str = "") -> str:
        """A device at `pci0000:17/0000:17:01.0/0000:18:00.0`, with the bridges before it; gives its folder."""
        steps = path.split("/")
        for end in range(2, len(steps)):
            if not (self.root / "sys/bus/pci/devices" / steps[end - 1]).is_symlink():
                self.pci("/".join(steps[:end]), "0x1000:0xc030", "0x060400", numa, driver="pcieport")
        folder = f"sys/devices/{path}"
        vendor, device = ids.split(":")
        values = {"vendor": vendor, "device": device, "class": kind, "numa_node": str(numa)}
        for name, value in values.items():
            self.write(f"{folder}/{name}", value)
        self.link(f"sys/bus/pci/devices/{steps[-1]}", folder)
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        if iommu:
            group = f"sys/kernel/iommu_groups/{len(list(self.root.glob('sys/kernel/iommu_groups/*')))}"
            self.write(f"{group}/type", iommu)
            self.link(f"{folder}/iommu_group", group)
        return folder

    def gpu(self, path: str, numa: int, iommu: str = "") -> None:
        """An NVIDIA GPU."""
        self.pci(path, "0x10de:0x2330", "0x030200", numa, driver="nvidia", iommu=iommu)

    def rdma(
        self,
        name: str,
        path: str,
        numa: int,
        *,
        layer: str = "InfiniBand",
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        gids: tuple[tuple[str, str], ...] = (("fe80:0000:0000:0000:a088:c203:0090:1234", "IB/RoCE v1"),),
        net: str = "",
        driver: str = "mlx5_core",
        ids: str = "0x15b3:0x1021",
    ) -> None:
        """A card with one RDMA port, at a PCIe path."""
        folder = self.pci(path, ids, "0x020700" if layer == "InfiniBand" else "0x020000", numa, driver=driver)
        device = f"{folder}/infiniband/{name}"
        port = f"{device}/ports/1"
        for key, value in {"link_layer": layer, "rate": rate, "state": state}.items():
            self.write(f"{port}/{key}", value)
        for index in range(max(4, len(gids))):
            value, kind = gids[index] if index < len(gids) else ("0000:" * 7 + "0000", "")
            self.write(f"{port}/gids/{index}", value)
            if kind:
                self.write(f"{port}/gid_attrs/types/{index}", kind)
                if net:
                    self.write(f"{port}/gid_attrs/ndevs/{index}", net)
        self.link(f"{device}/device", folder)
        self.link(f"sys/class/infiniband/{name}", device)

    def net(
        self,
        name: str,
        ip: str = "",
        *,
        path: str = "",
        state: str = "up",
        mbit_s: int | None = None,
        link: int = 1,
        uevent: str = "",
        default: bool = False,
        driver: str = "",
    ) -> str:
        """An interface; with a PCIe path it is a card's, and the card must be there."""
        folder = f"sys/devices/{path}/net/{name}" if path else f"sys/devices/virtual/net/{name}"
        self.write(f"{folder}/type", str(link))
        self.write(f"{folder}/operstate", state)
        self.write(f"{folder}/uevent", f"{uevent}\nINTERFACE={name}".strip())
        if mbit_s is not None:
            self.write(f"{folder}/speed", str(mbit_s))
        if path:
            self.link(f"{folder}/device", f"sys/devices/{path}")
        self.link(f"sys/class/net/{name}", folder)
        if ip:
            self.addresses.append((name, ip))
        if default:
            self.addresses.append((name, "default"))
        return folder

    def card(self, name: str, ip: str, path: str, numa: int, mbit_s: int | None, default: bool = False) -> None:
        """A plain network card and its interface."""
        self.pci(path, "0x8086:0x1572", "0x020000", numa, driver="i40e")
        self.net(name, ip, path=path, mbit_s=mbit_s, default=default)

    def loopback(self) -> None:
        """It is always there."""
        self.net("lo", "127.0.0.1/8", state="unknown", link=772)

    def hardware(self, host: str = "node01") -> Hardware:
        """What is read of it."""
        self.finish(host)
        return read_hardware(self.root)

    def finish(self, host: str = "node01") -> None:
        """Write what the parts together make."""
        rows = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"]
        local = ["Main:"]
        for name, ip in self.addresses:
            if ip == "default":
                rows.append(f"{name}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0")
                continue
            own = IPv4Interface(ip)
            local.append(f"           |-- {own.ip}\n              /32 host LOCAL")
            if name != "lo":
                words = (_hex(own.network.network_address), _hex(own.netmask))
                rows.append(f"{name}\t{words[0]}\t00000000\t0001\t0\t0\t100\t{words[1]}\t0\t0\t0")
        self.write("proc/net/route", "\n".join(rows))
        self.write("proc/net/fib_trie", "\n".join(local))
        self.write("proc/sys/kernel/hostname", host)
        if self.nvml is not None:
            self.write("nvml.json", json.dumps([asdict(gpu) for gpu in self.nvml]))


def _hex(address: IPv4Address) -> str:
    return address.packed[::-1].hex().upper()


def _address(path: str) -> str:
    return path.split("/")[-1]


def switched(index: int, *, slot: int) -> tuple[str, int]:
    """A place below the PCIe switch of rail `index` of eight, four to a socket; and its NUMA node."""
    bus = 0x10 + 0x10 * index
    root = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return f"{root}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0", index // 4


def dgx(root: Path, *, down: str = "", ip_over_ib: bool = True) -> Machine:
    """Like a DGX H100: 8 GPUs behind NVSwitches, each with an InfiniBand card of 400 Gb/s; 2 more cards for storage."""
    machine = Machine(root)
    machine.system(2, cores=224, gib=2048, maker="NVIDIA")
    machine.loopback()
    answers = []
    compute = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    for index, name in enumerate(compute):
        place, numa = switched(index, slot=0)
        machine.gpu(place, numa)
        links = tuple(("switch", f"0000:{4 + switch:02x}:00.0") for switch in range(4) for _ in range(4 + switch % 2))
        answers.append(NvmlGpu(index, _address(place), "NVIDIA H100 80GB HBM3", 80 * GiB, links, 26562))
        place, numa = switched(index, slot=1)
        machine.rdma(name, place, numa, state="1: DOWN" if name == down else "4: ACTIVE", net=f"ib{index}")
        address = f"192.168.{index}.11/24" if ip_over_ib else ""
        machine.net(f"ib{index}", address, path=place, mbit_s=400000, link=32)
    for index, name in enumerate(("mlx5_1", "mlx5_7")):
        place = f"pci0000:{0xA0 + index:02x}/0000:{0xA0 + index:02x}:01.0/0000:{0xB0 + index:02x}:00.0"
        machine.rdma(name, place, index)
    for switch in range(4):
        machine.pci(f"pci0000:00/0000:00:01.0/0000:{4 + switch:02x}:00.0", "0x10de:0x22a3", "0x068000", 0)
    machine.card("eno3", "10.0.0.11/24", "pci0000:00/0000:00:02.0/0000:08:00.0", 0, 10000, default=True)
    machine.write("sys/module/nvidia_peermem/version", "550.54.15")
    machine.write("sys/module/nvidia/version", "550.54.15")
    machine.nvml = tuple(answers)
    return machine


ROCE_GIDS = (
    ("fe80:0000:0000:0000:0e42:a1ff:fe7b:0001", "IB/RoCE v1"),
    ("fe80:0000:0000:0000:0e42:a1ff:fe7b:0001", "RoCE v2"),
    ("0000:0000:0000:0000:0000:ffff:0a01:000b", "IB/RoCE v1"),
    ("0000:0000:0000:0000:0000:ffff:0a01:000b", "RoCE v2"),
)


def roce(root: Path, gids: tuple[tuple[str, str], ...] = ROCE_GIDS) -> Machine:
    """4 PCIe GPUs and 4 cards of 100 Gb/s that speak RoCE, and one of 25 Gb/s for everything else that does too."""
    machine = Machine(root)
    machine.system(2, cores=64, gib=512, maker="Supermicro")
    machine.loopback()
    answers = []
    for index in range(4):
        place, numa = switched(2 * index, slot=0)
        machine.gpu(place, numa)
        answers.append(NvmlGpu(index, _address(place), "NVIDIA A100 80GB PCIe", 80 * GiB))
        place, numa = switched(2 * index, slot=1)
        net = f"ens{index + 1}f0"
        machine.rdma(
            f"mlx5_{index}", place, numa, layer="Ethernet", rate="100 Gb/sec (4X EDR)", net=net, gids=gids,
            ids="0x15b3:0x101d",
        )  # fmt: skip
        machine.net(net, f"10.1.{index}.11/24", path=place, mbit_s=100000)
    place = "pci0000:f0/0000:f0:01.0/0000:f1:00.0"
    machine.rdma("mlx5_4", place, 1, layer="Ethernet", rate="25 Gb/sec (1X EDR)", net="eno1", gids=gids)
    machine.net("eno1", "10.0.0.21/24", path=place, mbit_s=25000, default=True)
    machine.write("sys/module/nvidia/version", "550.54.15")
    machine.nvml = tuple(answers)
    return machine


def cloud(root: Path, *, efa: bool = False, mbit_s: int | None = 100000) -> Machine:
    """A virtual machine with 4 GPUs on PCIe and Ethernet, or Amazon's adapter beside it."""
    machine = Machine(root)
    machine.system(1, cores=48, gib=192, virtual=True, maker="Amazon EC2" if efa else "QEMU")
    machine.loopback()
    answers = []
    for index in range(4):
        place = f"pci0000:00/0000:00:{0x1B + index:02x}.0"
        machine.gpu(place, -1)
        answers.append(NvmlGpu(index, _address(place), "NVIDIA L4", 23 * GiB))
    place = "pci0000:00/0000:00:05.0"
    machine.pci(place, "0x1d0f:0xec20" if efa else "0x1af4:0x1041", "0x020000", -1, driver="ena" if efa else "virtio")
    machine.net("ens5", "172.31.4.7/20", path=place, mbit_s=mbit_s, default=True)
    if efa:
        machine.rdma(
            "rdmap0s6", "pci0000:00/0000:00:06.0", -1, layer="Unspecified", rate="100 Gb/sec (4X EDR)", driver="efa",
            ids="0x1d0f:0xefa1",
        )  # fmt: skip
    machine.nvml = tuple(answers)
    return machine


def laptop(root: Path) -> Machine:
    """Nothing but a processor and a wireless interface."""
    machine = Machine(root)
    machine.system(cores=8, gib=16)
    machine.loopback()
    machine.pci("pci0000:00/0000:00:14.3", "0x8086:0xa0f0", "0x028000", -1, driver="iwlwifi")
    machine.net("wlp0s20f3", "192.168.1.5/24", path="pci0000:00/0000:00:14.3", uevent="DEVTYPE=wlan", default=True)
    return machine


def bonded(root: Path) -> Machine:
    """2 GPUs with a bridge of NVLinks; two cards of 25 Gb/s as one interface; Docker and its virtual interfaces."""
    machine = Machine(root)
    machine.system(1, cores=32, gib=256)
    machine.loopback()
    places = ["pci0000:40/0000:40:01.0/0000:41:00.0", "pci0000:40/0000:40:03.0/0000:42:00.0"]
    for place in places:
        machine.gpu(place, 0)
    machine.nvml = tuple(
        NvmlGpu(i, _address(places[i]), "NVIDIA RTX A6000", 48 * GiB, (("gpu", _address(places[1 - i])),) * 4, 14062)
        for i in range(2)
    )
    for index in range(2):
        path = f"pci0000:20/0000:20:0{index + 1}.0/0000:2{index + 1}:00.0"
        machine.card(f"enp{33 + index}s0", "", path, 0, 25000)
    folder = machine.net("bond0", "10.20.0.4/24", mbit_s=50000, uevent="DEVTYPE=bond", default=True)
    machine.write(f"{folder}/bonding/slaves", "enp33s0 enp34s0")
    folder = machine.net("docker0", "172.17.0.1/16", state="down", uevent="DEVTYPE=bridge")
    machine.write(f"{folder}/bridge/bridge_id", "8000.0242")
    folder = machine.net("br-5f1c0a", "172.18.0.1/16", mbit_s=10000, uevent="DEVTYPE=bridge")
    machine.write(f"{folder}/bridge/bridge_id", "8000.0243")
    machine.net("veth1a2b3c", "", mbit_s=10000)
    return machine


def pair(root: Path, processor: tuple[str, str] = INTEL, gpus: int = 2) -> Machine:
    """A workstation: GPUs without NVLinks, each in a slot of the processor's own."""
    machine = Machine(root)
    machine.system(1, cores=32, gib=256, processor=processor)
    machine.loopback()
    places = [
        f"pci0000:{0x40 + 0x10 * i:02x}/0000:{0x40 + 0x10 * i:02x}:01.0/0000:{0x41 + 0x10 * i:02x}:00.0"
        for i in range(gpus)
    ]
    for place in places:
        machine.gpu(place, 0)
    machine.nvml = tuple(NvmlGpu(i, _address(place), "NVIDIA RTX A5000", 24 * GiB) for i, place in enumerate(places))
    machine.card("eno1", "10.0.0.31/24", "pci0000:00/0000:00:02.0/0000:08:00.0", 0, 10000, default=True)
    return machine


MACHINES = {"dgx": dgx, "roce": roce, "cloud": cloud, "laptop": laptop, "bonded": bonded}

if __name__ == "__main__":
    # python -m tests.machines dgx FOLDER, for `meshwright doctor --root FOLDER`
    MACHINES[sys.argv[1]](Path(sys.argv[2])).finish(sys.argv[1])
