"""Reads a machine's hardware from what the kernel shows under /sys and /proc, or from a recorded tree. No torch.

Whatever is missing or cannot be read is left out: containers hide much of it, and a tree of a test has only what it is
about.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cluster.hardware import Gid, Gpu, Hardware, NetInterface, NumaNode, PciDevice, RdmaPort
from meshwright.cluster.network import read_interfaces
from meshwright.cluster.nvml import NvmlGpu, ask_nvml, recorded_nvml, with_nvml
from meshwright.cluster.processors import gpu_addresses, gpu_name, numa_of, read_memory, read_numa, read_processors
from meshwright.cluster.tree import Tree
from meshwright.printable import printable

FILES = (
    "/etc/nccl.conf",
    "/opt/microsoft/ndv4-topo.xml",
    "/opt/microsoft/ndv5-topo.xml",
    "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so",
    "/opt/amazon/ofi-nccl/lib/libnccl-net.so",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so",
    "/opt/aws-ofi-nccl/lib/libnccl-net.so",
    "/usr/local/gib/scripts/set_nccl_env.sh",
    "/var/run/nvidia-topologyd/virtualTopology.xml",
)
"""Where cloud images keep topologies and network plugins for NCCL."""
_PEER_MODULES = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
"""Where NCCL looks for them."""
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
"""Domains have four digits, or more where a device of one makes another, as Intel's VMD does."""
ACS = 0x000D
"""Number of the extended PCIe capability for access control."""
_TO_PROCESSOR = 0x0C
"""In its control register: requests, or completions, go up to the root."""


def read_hardware(
    root: Path = Path("/"),
    nvml: tuple[NvmlGpu, ...] | None = None,
    host: str | None = None,
    tree: Tree | None = None,
) -> Hardware:
    """This machine, or the one whose trees are under `root`; what NVML said of that one is in its nvml.json."""
    here, why = root == Path("/"), ""
    tree = Tree(root) if tree is None else tree
    if nvml is None and here:
        nvml, why = ask_nvml()
    elif nvml is None:
        nvml, why = recorded_nvml(root / "nvml.json")
    if host is None:
        host = printable(socket.gethostname() if here else tree.text("proc/sys/kernel/hostname") or root.name)
    nodes, processors = read_numa(tree), read_processors(tree)
    pci = {name: _pci(tree, name, nodes) for name in tree.names("sys/bus/pci/devices")}
    driven = gpu_addresses(tree)
    gpus = tuple(
        Gpu(device.address, device.numa, name=gpu_name(tree, device.address))
        for device in pci.values()
        if device.is_gpu or device.address in driven
    )
    rdma = tuple(_rdma(tree, nodes))
    return Hardware(
        host,
        maker=tree.text("sys/class/dmi/id/sys_vendor") or "",
        product=tree.text("sys/class/dmi/id/product_name") or "",
        virtual=processors.virtual,
        processor=processors.name,
        processor_maker=processors.maker,
        cpus=processors.cpus or (here and os.cpu_count()) or 0,
        cores=processors.cores,
        memory_bytes=read_memory(tree, nodes),
        numa=nodes,
        pci=pci,
        gpus=with_nvml(gpus, nvml or ()),
        rdma=rdma,
        interfaces=tuple(_with_rate(one, rdma) for one in read_interfaces(tree, nodes)),
        gpu_driver=tree.text("sys/module/nvidia/version") or "",
        peer_memory=any(tree.has(module) for module in _PEER_MODULES),
        open_gpu_driver="Open Kernel Module" in (tree.text("proc/driver/nvidia/version") or ""),
        kernel=_kernel(tree),
        nvml=why,
        loopback_name=_named_loopback(tree, host),
        files=tuple(path for path in FILES if tree.has(path.lstrip("/"))),
    )


def _kernel(tree: Tree) -> tuple[int, int]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", tree.text("proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _named_loopback(tree: Tree, host: str) -> bool:
    for line in (tree.text("etc/hosts") or "").splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("127.") and host in words[1:]:
            return True
    return False


def _pci(tree: Tree, address: str, nodes: Sequence[NumaNode]) -> PciDevice:
    folder = f"sys/bus/pci/devices/{address}"
    parts = tree.real(folder).parts
    start = next((index for index, part in enumerate(parts) if _PCI_ROOT.fullmatch(part)), None)
    kind = tree.number(f"{folder}/class", 16) or 0
    return PciDevice(
        address,
        vendor=tree.text(f"{folder}/vendor") or "",
        device=tree.text(f"{folder}/device") or "",
        kind=kind >> 8,
        numa=numa_of(tree, folder, nodes),
        path=parts[start:] if start is not None else (address,),
        driver=tree.link_name(f"{folder}/driver"),
        iommu=tree.text(f"{folder}/iommu_group/type") or "",
        redirects=_redirects(tree.data(f"{folder}/config")) if kind >> 8 == 0x0604 else None,
        subsystem=_subsystem(tree, folder) if kind >> 8 == 0x0604 else "",
    )


def _subsystem(tree: Tree, folder: str) -> str:
    return ":".join(tree.text(f"{folder}/subsystem_{part}") or "" for part in ("vendor", "device"))


def _redirects(config: bytes) -> bool | None:
    """Whether a bridge's configuration space, of 4096 bytes if all of it may be read, has ACS send packets upwards."""
    if len(config) < 0x104:
        return None
    return bool((access_control(config) or 0) & _TO_PROCESSOR)


def access_control(config: bytes) -> int | None:
    """The control register of ACS in a configuration space; None where it has none."""
    at, seen = 0x100, 0
    while at and at + 8 <= len(config) and seen < 64:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at, seen = header >> 20, seen + 1
    return None


def _rdma(tree: Tree, nodes: Sequence[NumaNode]) -> list[RdmaPort]:
    found = []
    for device in tree.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        address = tree.link_name(f"{folder}/device")
        for number in tree.names(f"{folder}/ports"):
            port = f"{folder}/ports/{number}"
            gids = _gids(tree, port)
            rate = re.match(r"\d{1,9}(\.\d{1,9})?(?!\S)", tree.text(f"{port}/rate") or "")
            found.append(
                RdmaPort(
                    device,
                    int(number) if number.isdecimal() else 0,
                    tree.text(f"{port}/link_layer") or "Unknown",
                    (tree.text(f"{port}/state") or "").rpartition(":")[2].strip() or "unknown",
                    float(rate[0]) if rate else 0.0,
                    gids,
                    netdev=next((gid.netdev for gid in gids if gid.netdev), "")
                    or _netdev(tree, f"{folder}/device/net", number),
                    address=address,
                    numa=numa_of(tree, f"{folder}/device", nodes),
                    driver=tree.link_name(f"{folder}/device/driver"),
                )
            )
    return sorted(found, key=lambda one: (_natural(one.device), one.port))


def _netdev(tree: Tree, folder: str, port: str) -> str:
    """The interface of a port: of several, as cards with two ports on one PCIe address have, the one that counts so."""
    nets = tree.names(folder)
    for name in nets if len(nets) > 1 else []:
        # From 0; kernels before 3.15 have only dev_id.
        numbers = (tree.text(f"{folder}/{name}/{key}") for key in ("dev_port", "dev_id"))
        if any(_whole(text or "") + 1 == _whole(port) for text in numbers):
            return name
    return nets[0] if nets else ""


def _whole(text: str) -> int:
    return int(text, 0) if re.fullmatch(r"0x[0-9a-f]{1,8}|0|[1-9]\d{0,8}", text) else -1


def _with_rate(interface: NetInterface, ports: Sequence[RdmaPort]) -> NetInterface:
    """With the speed of its port, where an interface of InfiniBand tells none of its own."""
    own = [port for port in ports if port.netdev == interface.name and port.address == interface.address]
    if interface.mbit_s is not None or interface.kind != "infiniband" or not own or not own[0].gbit_s:
        return interface
    return replace(interface, mbit_s=round(own[0].gbit_s * 1000))


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key by which mlx5_2 comes before mlx5_10."""
    return tuple((word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name))


def is_empty_gid(value: str) -> bool:
    """Whether an entry is not in use: zeros, which InfiniBand puts its network's prefix before."""
    return not value.replace(":", "")[16:].strip("0")


def _gids(tree: Tree, port: str) -> tuple[Gid, ...]:
    """Those in use."""
    found = []
    for name in tree.names(f"{port}/gids"):
        value = tree.text(f"{port}/gids/{name}") or ""
        if not name.isdecimal() or is_empty_gid(value):
            continue
        kind = (tree.text(f"{port}/gid_attrs/types/{name}") or "").removeprefix("IB/")
        found.append(Gid(int(name), value, kind, tree.text(f"{port}/gid_attrs/ndevs/{name}") or ""))
    return tuple(sorted(found, key=lambda gid: gid.index))
