"""A cluster: how many chips of which kind, how they are linked, what they cost. `64xh100`, a TOML file, or `here`.

No torch. Ranks are placed in order: consecutive ranks share a machine, as every launcher does it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.cluster.calibration import Calibration, Speeds, read_calibration
from meshwright.cluster.chips import Chip, check_positive, chips, find_chip, make_chip
from meshwright.errors import UserError, nearest

HERE = "here"
CORES = "this machine's CPU cores"
_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w.\- ]*)")
_FILE_KEYS = ("chip", "nodes", "gpus_per_node", "nic", "link", "domain", "price", "host_gib", "reserve_gib")


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind. Bandwidths are GB/s, one way, for each chip."""

    chip: Chip
    gpus: int
    node: int
    """Chips of a machine."""
    domain: int
    """Chips that reach each other over the fast links."""
    link: float
    nic: float
    price: float | None = None
    """Money for a chip and an hour, where it is known."""
    host_gib: float = 128
    reserve_gib: float = 0.0
    """Memory of a chip that others use."""
    note: str = ""
    share: float = 1.0
    """Of a core that each rank has, where ranks share them."""
    speeds: Speeds | None = field(default=None, hash=False)
    """What was measured on such a chip, where something was."""
    measured: str = ""
    """Where and when that was; or why what is on file is not used."""

    @property
    def nodes(self) -> int:
        """Machines, the last one perhaps not full."""
        return -(-self.gpus // self.node)

    @property
    def memory(self) -> float:
        """Bytes of a chip that training can have."""
        return self.chip.memory - self.reserve_gib * 2**30

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines in another number."""
        return cpu_ranks(gpus) if self.note == CORES else replace(self, gpus=gpus)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.chip.name}"


def of_chip(chip: Chip, gpus: int, **changes: Any) -> Cluster:
    """A cluster of the machines in which a chip is usually sold."""
    node = min(chip.node, gpus)
    values: dict[str, Any] = {
        "node": node,
        "domain": min(chip.domain, max(gpus, 1)),
        "link": chip.link,
        "nic": chip.nic,
    }
    values |= {"host_gib": chip.host_gib} | changes
    return Cluster(chip=chip, gpus=gpus, **values)


def parse_cluster(text: str) -> Cluster:
    """The cluster that a word or a file describes, with what was measured here on such chips."""
    return with_calibration(_parse(text))


def _parse(text: str) -> Cluster:
    if text == HERE:
        return this_machine()
    if text.endswith(".toml") or os.sep in text:
        return read_cluster(Path(text))
    match = _SHORT.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--cluster={text} is not a number of chips (64xh100, or machines x chips: 8x4xh100), a .toml file or "
            f"'here'; chips: {', '.join(chips())}"
        )
    nodes, count, name = match.groups()
    chip = find_chip(name)
    if int(count) < 1 or (nodes is not None and int(nodes) < 1):
        raise UserError(f"--cluster={text} has no chips; use at least 1x{chip.key}")
    if nodes is None:
        return of_chip(chip, int(count))
    return of_chip(
        chip,
        int(nodes) * int(count),
        node=int(count),
        domain=max(int(count), min(chip.domain, int(nodes) * int(count)) if chip.domain > chip.node else int(count)),
    )


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--cluster={path}: there is no such file; docs/plan.md shows one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--cluster={path} is not readable as TOML: {error}") from None
    for key in table:
        if key not in _FILE_KEYS:
            raise UserError(f"{path}: unknown key '{key}'{nearest(key, _FILE_KEYS)}; it has {', '.join(_FILE_KEYS)}")
    if "chip" not in table or "nodes" not in table:
        raise UserError(f'{path}: chip and nodes are needed, such as chip = "h100" and nodes = 8')
    named = table["chip"]
    chip = make_chip(str(named.get("name", "own")), named) if isinstance(named, dict) else find_chip(str(named))
    node = table.get("gpus_per_node", chip.node)
    for key, value in (("nodes", table["nodes"]), ("gpus_per_node", node)):
        check_positive(str(path), key, value)
        if not isinstance(value, int):
            raise UserError(f"{path}: {key}={value!r} must be a whole number")
    values: dict[str, Any] = {"node": node}
    for key in ("nic", "link", "domain", "price", "host_gib"):
        if key in table:
            check_positive(str(path), key, table[key])
            values[key] = table[key]
    reserve = table.get("reserve_gib", 0.0)
    if not isinstance(reserve, int | float) or not 0 <= reserve < chip.memory_mib / 1024:
        raise UserError(
            f"{path}: reserve_gib={reserve!r} must be from 0 to the chip's {chip.memory_mib / 1024:.0f} GiB"
        )
    if "domain" not in values:
        values["domain"] = node if chip.domain <= chip.node else min(chip.domain, node * table["nodes"])
    return of_chip(chip, node * table["nodes"], reserve_gib=float(reserve), note=str(path), **values)


def this_machine() -> Cluster:
    """What this machine has: NVIDIA GPUs where nvidia-smi lists some, else its CPU cores."""
    found = _nvidia_gpus()
    if found:
        name, memory_mib = found[0]
        chip = chip_named(name, memory_mib)
        if chip is None:
            raise UserError(
                f"this machine has {len(found)} x {name}, which is in no table; "
                "describe it in a cluster file (docs/plan.md)"
            )
        return of_chip(replace(chip, memory_mib=memory_mib), len(found), node=len(found), note=f"this machine: {name}")
    return cpu_ranks(cores_here())


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_ranks(ranks: int) -> Cluster:
    """That many ranks on this machine's cores, which they share; with what was measured here, if it was."""
    cores, gib = cores_here(), _host_gib()
    chip = replace(chips()["cpu"], memory_mib=gib * 1024 / ranks, host_gib=gib / ranks)
    share = min(1.0, cores / ranks)
    calibration, ignored = read_calibration(chip.key)
    if calibration is None:
        chip = replace(
            chip,
            tflops={dtype: peak * share for dtype, peak in chip.tflops.items()},
            memory_bandwidth=chip.memory_bandwidth * share,
            link=chip.link * share,
        )
        return of_chip(chip, ranks, node=ranks, domain=ranks, note=CORES, share=share, measured=ignored)
    speeds = calibration.of(ranks, cores)
    tflops = {dtype: max(row[-1] for row in rows) / 1e12 for dtype, rows in speeds.products.items()}
    chip = replace(chip, tflops=tflops, memory_bandwidth=speeds.memory / 1e9)
    return of_chip(
        chip, ranks, node=ranks, domain=ranks, note=CORES, share=share, speeds=speeds, measured=str(calibration)
    )


def with_calibration(cluster: Cluster) -> Cluster:
    """The same, with what was measured on this machine's chips if they are of that kind."""
    if cluster.chip.key == "cpu":
        return cluster
    calibration, ignored = read_calibration(cluster.chip.key)
    if calibration is None:
        return replace(cluster, measured=ignored)
    return replace(cluster, speeds=_of_one(calibration, cluster), measured=str(calibration))


def _of_one(calibration: Calibration, cluster: Cluster) -> Speeds:
    """What GPUs reach beside each other; what they exchange was measured in machines of another size, or not at all."""
    measured = [size for size in calibration.crowds if size > 1 and size <= cluster.domain]
    return calibration.crowds[max(measured)] if measured and cluster.gpus > 1 else calibration.crowds[1]


def chip_named(name: str, memory_mib: float) -> Chip | None:
    """The chip that a driver calls so: the longest of our names in it, and of those the one with the nearest memory."""
    plain = name.lower().replace(" ", "").replace("-", "")
    fitting = [chip for key, chip in chips().items() if key != "cpu" and key.split("-")[0] in plain]
    if not fitting:
        return None
    longest = max(len(chip.key.split("-")[0]) for chip in fitting)
    same = [chip for chip in fitting if len(chip.key.split("-")[0]) == longest]
    pcie = [chip for chip in same if chip.key.endswith("pcie") == ("pcie" in plain)]
    return min(pcie or same, key=lambda chip: abs(chip.memory_mib - memory_mib))


def _nvidia_gpus() -> list[tuple[str, float]]:
    """Names and MiB of the GPUs that nvidia-smi lists and programs may use; none where there is no such program."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    found = [(name.strip(), float(memory)) for name, memory in rows if memory.strip().replace(".", "").isdecimal()]
    # Numbers or names of GPUs; those of one machine are alike.
    return found[: len(visible.split(","))] if visible is not None else found


def _host_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return 8.0
