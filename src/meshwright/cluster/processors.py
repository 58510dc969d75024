"""Reads a machine's processors, memory and NUMA nodes, and which of the nodes are the memory of GPUs. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.cluster.hardware import ARM, IBM, NumaNode
from meshwright.cluster.tree import Tree

_GPUS = "proc/driver/nvidia/gpus"


class Processors(NamedTuple):
    """What /proc/cpuinfo tells of all of them together."""

    name: str
    maker: str
    cpus: int
    cores: int
    virtual: bool


def read_processors(tree: Tree) -> Processors:
    """Those that are online."""
    text = tree.text("proc/cpuinfo") or ""
    virtual = re.search(r"^flags\s*:.*\bhypervisor\b", text, re.MULTILINE) is not None
    cpus = _cpus(tree, text)
    # The kernel counts the cores of a package whether they are online or not.
    return Processors(_name(text), _maker(text), cpus, min(_cores(text), cpus), virtual)


def read_memory(tree: Tree, nodes: Sequence[NumaNode]) -> int:
    """Bytes of the processors' memory: the kernel adds that of GPUs which are NUMA nodes, and here it is left out."""
    total = _kibibytes(tree.text("proc/meminfo") or "")
    return max(0, total - sum(node.memory_bytes for node in nodes if node.gpu))


def read_numa(tree: Tree) -> tuple[NumaNode, ...]:
    """All nodes, by number."""
    gpus = _gpu_nodes(tree)
    found = []
    for name in tree.names("sys/devices/system/node"):
        if (number := re.fullmatch(r"node(\d{1,9})", name)) is None:
            continue
        folder, index = f"sys/devices/system/node/{name}", int(number[1])
        cpus = tree.text(f"{folder}/cpulist")
        if cpus is None:
            cpus = as_list(cpus_of_mask(tree.text(f"{folder}/cpumap") or ""))
        memory = _kibibytes(tree.text(f"{folder}/meminfo") or "")
        found.append(NumaNode(index, cpus, memory, gpus.get(index, "")))
    return tuple(sorted(found, key=lambda node: node.index))


def gpu_addresses(tree: Tree) -> list[str]:
    """PCIe addresses of the GPUs that NVIDIA's driver runs."""
    return tree.names(_GPUS)


def gpu_name(tree: Tree, address: str) -> str:
    """What NVIDIA's driver calls a GPU, which needs no NVML; empty where it is not loaded."""
    return _after(tree.text(f"{_GPUS}/{address}/information") or "", r"^Model:\s*(.+)$")


def numa_of(tree: Tree, device: str, nodes: Sequence[NumaNode]) -> int | None:
    """The NUMA node of a device: as the kernel says or, where it does not, the one that has all CPUs beside it."""
    if (number := tree.numa(device)) is not None:
        return number
    beside = cpus_in(tree.text(f"{device}/local_cpulist") or "") or cpus_of_mask(
        tree.text(f"{device}/local_cpus") or ""
    )
    holding = [node.index for node in nodes if beside and beside <= cpus_in(node.cpus)]
    return holding[0] if len(holding) == 1 else None


def cpus_in(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: `0-3,8`."""
    found: set[int] = set()
    for part in text.split(","):
        if (numbers := re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)) is not None:
            found |= set(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1))
    return found


def cpus_of_mask(text: str) -> set[int]:
    """The numbers of a mask as the kernel writes it: hexadecimal, in words of 32 bits from high to low."""
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        return set()
    mask = int("".join(word.rjust(8, "0") for word in words), 16)
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}


def as_list(cpus: set[int]) -> str:
    """Numbers in the kernel's short form."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _gpu_nodes(tree: Tree) -> Mapping[int, str]:
    """GPUs whose memory is a NUMA node, as with POWER9 and Grace, by the node's number."""
    found = {}
    for address in gpu_addresses(tree):
        number = _after(tree.text(f"{_GPUS}/{address}/numa_status") or "", r"^Node:\s*(\d{1,9})$")
        if number:
            found[int(number)] = address
    return found


def _cpus(tree: Tree, cpuinfo: str) -> int:
    online = cpus_in(tree.text("sys/devices/system/cpu/online") or "")
    return len(online) or len(re.findall(r"^processor\s*\d*\s*:", cpuinfo, re.MULTILINE))


def _cores(cpuinfo: str) -> int:
    """Those of each package that is there; only x86 processors tell."""
    packages: dict[str, int] = {}
    for block in re.split(r"\n\s*\n", cpuinfo):
        package, cores = _after(block, r"^physical id\s*:\s*(\d+)$"), _after(block, r"^cpu cores\s*:\s*(\d{1,9})$")
        if package and cores:
            packages[package] = int(cores)
    return sum(packages.values())


def _name(cpuinfo: str) -> str:
    name = _after(cpuinfo, r"^model name\s*:\s*(.+)$") or _after(cpuinfo, r"^cpu\s*:\s*(\D.*)$")
    return " ".join(name.split())


def _maker(cpuinfo: str) -> str:
    for maker, line in ((ARM, r"^CPU implementer\s*:"), (IBM, r"^cpu\s*:\s*POWER")):
        if re.search(line, cpuinfo, re.MULTILINE):
            return maker
    return _after(cpuinfo, r"^vendor_id\s*:\s*(.+)$")


def _kibibytes(meminfo: str) -> int:
    found = _after(meminfo, r"MemTotal:\s*(\d{1,15}) kB")
    return int(found) * 1024 if found else 0


def _after(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""
