"""Reads a machine's hardware from what the kernel shows under /sys and /proc, or from a recorded tree. No torch.

Whatever is missing or cannot be read is left out: containers hide much of it, and a tree of a test has only what it is
about.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from meshwright.cluster.hardware import ARM, Gid, Gpu, Hardware, NumaNode, PciDevice, RdmaPort
from meshwright.cluster.network import read_interfaces
from meshwright.cluster.nvml import NvmlGpu, ask_nvml, recorded_nvml, with_nvml
from meshwright.cluster.tree import Tree

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
_ACS = 0x000D
"""Number of the extended PCIe capability for access control."""
_TO_PROCESSOR = 0x0C
"""In its control register: requests, or completions, go up to the root."""


def read_hardware(root: Path = Path("/"), nvml: tuple[NvmlGpu, ...] | None = None, host: str | None = None) -> Hardware:
    """This machine, or the one whose trees are under `root`; what NVML said of that one is in its nvml.json."""
    tree, here = Tree(root), root == Path("/")
    why = ""
    if nvml is None and here:
        nvml, why = ask_nvml()
    elif nvml is None:
        nvml, why = recorded_nvml(root / "nvml.json")
    if host is None:
        host = socket.gethostname() if here else tree.text("proc/sys/kernel/hostname") or root.name
    pci = {name: _pci(tree, name) for name in tree.names("sys/bus/pci/devices")}
    gpus = tuple(Gpu(device.address, device.numa) for device in pci.values() if device.is_gpu)
    processors = tree.text("proc/cpuinfo") or ""
    return Hardware(
        host,
        maker=tree.text("sys/class/dmi/id/sys_vendor") or "",
        product=tree.text("sys/class/dmi/id/product_name") or "",
        virtual=re.search(r"^flags\s*:.*\bhypervisor\b", processors, re.MULTILINE) is not None,
        processor=_after(processors, r"^model name\s*:\s*(.+)$"),
        processor_maker=_maker(processors),
        cores=len(re.findall(r"^processor\s*:", processors, re.MULTILINE)) or (here and os.cpu_count()) or 0,
        memory_bytes=_kibibytes(tree.text("proc/meminfo") or ""),
        numa=_numa(tree),
        pci=pci,
        gpus=with_nvml(gpus, nvml or ()),
        rdma=tuple(_rdma(tree)),
        interfaces=read_interfaces(tree),
        gpu_driver=tree.text("sys/module/nvidia/version") or "",
        peer_memory=any(tree.has(module) for module in _PEER_MODULES),
        open_gpu_driver="Open Kernel Module" in (tree.text("proc/driver/nvidia/version") or ""),
        kernel=_kernel(tree),
        nvml=why,
        loopback_name=_named_loopback(tree, host),
        files=tuple(path for path in FILES if tree.has(path.lstrip("/"))),
    )


def _after(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _maker(cpuinfo: str) -> str:
    arm = re.search(r"^CPU implementer\s*:", cpuinfo, re.MULTILINE) is not None
    return ARM if arm else _after(cpuinfo, r"^vendor_id\s*:\s*(.+)$")


def _kibibytes(meminfo: str) -> int:
    found = _after(meminfo, r"MemTotal:\s*(\d+) kB")
    return int(found) * 1024 if found else 0


def _kernel(tree: Tree) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", tree.text("proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _named_loopback(tree: Tree, host: str) -> bool:
    for line in (tree.text("etc/hosts") or "").splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("127.") and host in words[1:]:
            return True
    return False


def _numa(tree: Tree) -> tuple[NumaNode, ...]:
    found = []
    for name in tree.names("sys/devices/system/node"):
        if (number := re.fullmatch(r"node(\d+)", name)) is None:
            continue
        folder = f"sys/devices/system/node/{name}"
        cpus = tree.text(f"{folder}/cpulist") or ""
        found.append(NumaNode(int(number[1]), cpus, _kibibytes(tree.text(f"{folder}/meminfo") or "")))
    return tuple(sorted(found, key=lambda node: node.index))


def _pci(tree: Tree, address: str) -> PciDevice:
    folder = f"sys/bus/pci/devices/{address}"
    parts = tree.real(folder).parts
    start = next((index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4}:[0-9a-f]{2}", part)), None)
    kind = tree.number(f"{folder}/class", 16) or 0
    return PciDevice(
        address,
        vendor=tree.text(f"{folder}/vendor") or "",
        device=tree.text(f"{folder}/device") or "",
        kind=kind >> 8,
        numa=tree.numa(folder),
        path=parts[start:] if start is not None else (address,),
        driver=tree.link_name(f"{folder}/driver"),
        iommu=tree.text(f"{folder}/iommu_group/type") or "",
        redirects=_redirects(tree.data(f"{folder}/config")) if kind >> 8 == 0x0604 else None,
    )


def _redirects(config: bytes) -> bool | None:
    """Whether a bridge's configuration space, of 4096 bytes if all of it may be read, has ACS send packets upwards."""
    if len(config) < 0x104:
        return None
    at, seen = 0x100, 0
    while at and at + 8 <= len(config) and seen < 64:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & _TO_PROCESSOR)
        at, seen = header >> 20, seen + 1
    return False


def _rdma(tree: Tree) -> list[RdmaPort]:
    found = []
    for device in tree.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        address = tree.link_name(f"{folder}/device")
        nets = tree.names(f"{folder}/device/net")
        for number in tree.names(f"{folder}/ports"):
            port = f"{folder}/ports/{number}"
            gids = _gids(tree, port)
            rate = re.match(r"[\d.]+", tree.text(f"{port}/rate") or "")
            found.append(
                RdmaPort(
                    device,
                    int(number) if number.isdecimal() else 0,
                    tree.text(f"{port}/link_layer") or "Unknown",
                    (tree.text(f"{port}/state") or "").rpartition(":")[2].strip() or "unknown",
                    float(rate[0]) if rate else 0.0,
                    gids,
                    netdev=next((gid.netdev for gid in gids if gid.netdev), nets[0] if nets else ""),
                    address=address,
                    numa=tree.numa(f"{folder}/device"),
                    driver=tree.link_name(f"{folder}/device/driver"),
                )
            )
    return sorted(found, key=lambda one: (_natural(one.device), one.port))


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key by which mlx5_2 comes before mlx5_10."""
    return tuple((word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name))


def _gids(tree: Tree, port: str) -> tuple[Gid, ...]:
    """Entries in use: the kernel fills the rest with zeros, whose types cannot be read."""
    found = []
    for name in tree.names(f"{port}/gids"):
        value = tree.text(f"{port}/gids/{name}") or ""
        if not name.isdecimal() or not value.strip("0:"):
            continue
        kind = (tree.text(f"{port}/gid_attrs/types/{name}") or "").removeprefix("IB/")
        found.append(Gid(int(name), value, kind, tree.text(f"{port}/gid_attrs/ndevs/{name}") or ""))
    return tuple(sorted(found, key=lambda gid: gid.index))
