"""A cluster: how many chips of which kind, how they are linked, what they cost. `64xh100`, a TOML file, or `here`.

No torch. Consecutive ranks share a machine, as every launcher does it.
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
from meshwright.cluster.fabric import Path as NodePath
from meshwright.cluster.fabric import read_names, read_paths
from meshwright.cluster.link_lines import LinkLine
from meshwright.errors import UserError, nearest

HERE = "here"
MOST_CHIPS = 1_000_000
CORES = "this machine's CPU cores"
_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w.\- ]*)")
_FILE_KEYS = (
    "chip", "nodes", "gpus_per_node", "nic", "link", "domain", "price", "host_gib", "reserve_gib", "names", "path",
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Machines, of one kind unless there are groups. Bandwidths are GB/s, one way, for each chip."""

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
    lines: tuple[LinkLine, ...] = ()
    """What `bench comm` measured of the links of such machines."""
    groups: tuple[Cluster, ...] = ()
    """Where there are several kinds: each of them, in the order in which ranks are placed. The rest is then what all
    of them have: see `groups.together`."""

    names: tuple[str, ...] = ()
    """Host names of the machines, in the order of the ranks, where they are known."""
    paths: tuple[NodePath, ...] = ()
    """What was measured or is known between them."""

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """Its groups, or itself."""
        return self.groups or (self,)

    def mean_peak(self, dtype: str) -> float:
        """FLOP/s of a chip in a dtype, on average."""
        return sum(group.gpus * group.chip.peak(dtype) for group in self.kinds) / self.gpus

    @property
    def hourly(self) -> float:
        """Money for an hour of all of them; where a price is not known, how many there are."""
        return self.gpus * (1.0 if self.price is None else self.price)

    @property
    def nodes(self) -> int:
        """Machines, the last one perhaps not full."""
        if self.groups:
            return sum(group.nodes for group in self.groups)
        return -(-self.gpus // self.node)

    @property
    def memory(self) -> float:
        """Bytes of a chip that training can have."""
        return self.chip.memory - self.reserve_gib * 2**30

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines in another number; of several kinds the first ones."""
        if self.groups:
            from meshwright.cluster.groups import first_of

            return first_of(self, gpus)
        return cpu_ranks(gpus) if self.note == CORES else replace(self, gpus=gpus)

    def with_price(self, price: float) -> Cluster:
        """The same machines at that price for each chip and hour."""
        return replace(self, price=price, groups=tuple(group.with_price(price) for group in self.groups))

    def __str__(self) -> str:
        return " + ".join(f"{group.gpus} x {group.chip.name}" for group in self.kinds)


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
    if "+" in text:
        return _together([_read_group(part, text) for part in text.split("+")])
    match = _SHORT.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--cluster={text} is not a number of chips (64xh100, or machines x chips: 8x4xh100, or several kinds: "
            f"32xh100+32xa100), a .toml file or 'here'; chips: {', '.join(chips())}"
        )
    nodes, count, name = match.groups()
    chip = find_chip(name)
    if max(len(count), len(nodes or "")) > len(str(MOST_CHIPS)) or int(count) * int(nodes or 1) > MOST_CHIPS:
        raise UserError(f"--cluster={text[:60]} has more than {MOST_CHIPS:,} chips, which is more than is planned for")
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


def _together(groups: list[Cluster], note: str = "") -> Cluster:
    from meshwright.cluster.groups import together

    return together(groups, note)


def _read_group(part: str, text: str) -> Cluster:
    """One of several kinds of chips in a short form."""
    if _SHORT.fullmatch(part.strip()) is None:
        raise UserError(f"--cluster={text}: '{part}' is not a number of chips; write 32xh100+32xa100")
    return parse_cluster(part.strip())


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--cluster={path}: there is no such file; docs/plan.md shows one") from None
    except OSError as error:
        raise UserError(f"--cluster={path} cannot be read: {error.strerror}; docs/plan.md shows such a file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--cluster={path} is not readable as TOML: {error}") from None
    if "group" not in table:
        return _of_table(path, str(path), table)
    groups = table["group"]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise UserError(f"{path}: group must be one or more [[group]] tables, each with chip and nodes")
    for key in ("names", "path"):
        if key in table:
            raise UserError(f"{path}: {key} is for machines of one kind; those of several stay in the order of groups")
    # What stands above the groups holds for all of them that do not say otherwise.
    common = {key: value for key, value in table.items() if key != "group"}
    if "nodes" in common:
        raise UserError(f"{path}: nodes={common['nodes']!r} stands above the groups; say it in each [[group]]")
    found = [_of_table(path, f"{path}, group {number}", common | group) for number, group in enumerate(groups, 1)]
    return _together(found, str(path))


def _of_table(path: Path, where: str, table: dict[str, Any]) -> Cluster:
    """Machines of one kind; `where` names the table in refusals."""
    known = [*_FILE_KEYS, "group"]
    for key in table:
        if key not in _FILE_KEYS:
            raise UserError(f"{where}: unknown key '{key}'{nearest(key, known)}; it has {', '.join(known)}")
    if "chip" not in table or "nodes" not in table:
        raise UserError(f'{where}: chip and nodes are needed, such as chip = "h100" and nodes = 8')
    named = table["chip"]
    chip = make_chip(str(named.get("name", "own")), named) if isinstance(named, dict) else find_chip(str(named))
    node = table.get("gpus_per_node", chip.node)
    for key, value in (("nodes", table["nodes"]), ("gpus_per_node", node)):
        check_positive(where, key, value)
        if not isinstance(value, int):
            raise UserError(f"{where}: {key}={value!r} must be a whole number")
    values: dict[str, Any] = {"node": node}
    for key in ("nic", "link", "domain", "price", "host_gib"):
        if key in table:
            check_positive(where, key, table[key])
            values[key] = table[key]
    if not isinstance(values.get("domain", 1), int):
        raise UserError(f"{where}: domain={values['domain']!r} must be a whole number")
    if node * table["nodes"] > MOST_CHIPS:
        raise UserError(f"{where}: {node} x {table['nodes']} chips; more than {MOST_CHIPS:,} are not planned for")
    reserve = table.get("reserve_gib", 0.0)
    if not isinstance(reserve, int | float) or not 0 <= reserve < chip.memory_mib / 1024:
        raise UserError(
            f"{where}: reserve_gib={reserve!r} must be from 0 to the chip's {chip.memory_mib / 1024:.0f} GiB"
        )
    if "domain" not in values:
        values["domain"] = node if chip.domain <= chip.node else min(chip.domain, node * table["nodes"])
    values["names"] = read_names(where, table, table["nodes"])
    values["paths"] = read_paths(where, table, values["names"])
    if values["paths"] and values["domain"] != node:
        raise UserError(f"{where}: [[path]] goes between machines of {node}, and fast links reach {values['domain']}")
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
    lines = calibration.links if calibration is not None else ()
    if calibration is None or not calibration.crowds:
        chip = replace(
            chip,
            tflops={dtype: peak * share for dtype, peak in chip.tflops.items()},
            memory_bandwidth=chip.memory_bandwidth * share,
            link=chip.link * share,
        )
        return of_chip(chip, ranks, node=ranks, domain=ranks, note=CORES, share=share, measured=ignored, lines=lines)
    speeds = calibration.of(ranks, cores)
    tflops = {dtype: max(row[-1] for row in rows) / 1e12 for dtype, rows in speeds.products.items()}
    chip = replace(chip, tflops=tflops, memory_bandwidth=speeds.memory / 1e9)
    return of_chip(
        chip, ranks, node=ranks, domain=ranks, note=CORES, share=share, speeds=speeds, measured=str(calibration),
        lines=lines,
    )  # fmt: skip


def with_calibration(cluster: Cluster) -> Cluster:
    """The same, with what was measured on this machine's chips if they are of that kind."""
    if cluster.groups:
        return _together([with_calibration(group) for group in cluster.groups], cluster.note)
    calibration, ignored = read_calibration(cluster.chip.key)
    if calibration is None:
        return replace(cluster, measured=ignored)
    cluster = replace(cluster, lines=calibration.links)
    # How fast ranks on cores are is a matter of how many share them: `cpu_ranks` knows.
    if cluster.chip.key == "cpu" or not calibration.crowds:
        return cluster
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
