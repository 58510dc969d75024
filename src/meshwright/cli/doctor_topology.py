"""`meshwright doctor --topology`: what was found of this machine, how its parts are joined, what was measured."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cli.doctor_text import beside, console, heading, indented
from meshwright.cluster.calibration import Calibration, calibration_file, read_calibration
from meshwright.cluster.hardware import ARM, Distance, Gpu, Hardware, NumaNode, RdmaPort, interface_rate
from meshwright.files import cache_folder
from meshwright.printable import printable

_MOST_NODES = 4096
_WORDS = {
    Distance.PIX: "PIX one PCIe switch",
    Distance.PXB: "PXB several switches",
    Distance.PHB: "PHB through a processor",
    Distance.SYS: "SYS from processor to processor",
}


def show(hardware: Hardware, recorded: bool = False) -> None:
    """On the terminal; of a recorded machine nothing that was measured, or is set, on this one."""
    out = console()
    out.print(Text(f"{hardware.host}: {machine(hardware)}"))
    beside(out, [("nodes", nodes_text(hardware, [] if recorded else nodes()))])
    heading(out, "NUMA and PCIe")
    _tree(out, hardware)
    if hardware.gpus:
        heading(out, "between GPUs")
        _links(out, hardware)
    heading(out, "network")
    _network(out, hardware)
    heading(out, "measured")
    _measured(out, [] if recorded else _calibrations())


def as_json(hardware: Hardware, recorded: bool = False) -> dict[str, Any]:
    """As plain data: all devices, and what lies between GPUs, and between GPUs and ports."""
    addresses = {**{gpu.address: gpu.label for gpu in hardware.gpus}}
    addresses |= {port.address: port.device for port in hardware.rdma if port.address}
    between = {
        name: {gpu.address: _between(hardware, address, gpu) for gpu in hardware.gpus if gpu.address != address}
        for address, name in addresses.items()
    }
    calibrations = [
        {"chip": one.chip, "when": one.when, "torch": one.torch, "links": [asdict(line) for line in one.lines]}
        for one, _ in ([] if recorded else _calibrations())
        if one
    ]
    job = [] if recorded else nodes()
    return {**asdict(hardware), "nodes": job, "distances": between, "calibrations": calibrations}


def machine(hardware: Hardware) -> str:
    """Processor, cores, memory."""
    maker, product = hardware.maker, hardware.product
    # Some makers write their name before the product's too.
    model = product if product.lower().startswith(maker.lower()) else f"{maker} {product}"
    processor = hardware.processor or ("ARM" if hardware.processor_maker == ARM else "")
    memory = f"{_gib(hardware.memory_bytes)} GiB" if hardware.memory_bytes else ""
    parts = [model.strip(), "virtual machine" if hardware.virtual else "", processor, _counted(hardware), memory]
    return ", ".join(filter(None, parts))


def _counted(hardware: Hardware) -> str:
    cpus = f"{hardware.cpus} CPUs" if hardware.cpus else ""
    if not hardware.cores:
        return cpus
    return f"{hardware.cores} cores" + (f" ({cpus})" if hardware.cpus != hardware.cores else "")


def _gib(size: int) -> str:
    """Whole ones; of less than ten with a decimal."""
    return f"{size / 2**30:,.1f}" if size < 9.95 * 2**30 else f"{size / 2**30:,.0f}"


def nodes() -> list[str]:
    """Names of the machines of the scheduler's job that this is a part of, if it is."""
    return expand_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))


def nodes_text(hardware: Hardware, others: list[str]) -> str:
    """A machine and the others of its job."""
    if not others:
        return f"{hardware.host}; no job of Slurm names others"
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    return f"{len(others)} of this job: {', '.join(others[:8])}{more}"


def expand_nodes(text: str) -> list[str]:
    """Slurm's short form, `gpu[01-03,07],login1`, as names."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\]([^\[\]]*)", part)
        if match is None:
            found.append(part)
            continue
        for numbers in match[2].split(","):
            first, _, last = numbers.partition("-")
            if not first.isdecimal() or (last and not last.isdecimal()):
                continue
            count = min(int(last or first) - int(first) + 1, _MOST_NODES)
            found += [f"{match[1]}{int(first) + step:0{len(first)}}{match[3]}" for step in range(count)]
    return found[:_MOST_NODES]


def _tree(out: Console, hardware: Hardware) -> None:
    rows: dict[int | None, list[tuple[str, str]]] = {}
    for gpu in hardware.gpus:
        memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
        rows.setdefault(gpu.numa, []).append((gpu.address, f"{gpu.label}  {gpu.name or 'NVIDIA GPU'}{memory}"))
    for port in hardware.rdma:
        rows.setdefault(port.numa, []).append((port.address, f"{port.device}  {_port(port)}"))
    rdma = {port.address for port in hardware.rdma}
    for one in hardware.interfaces:
        if one.address and one.address not in rdma:
            rows.setdefault(one.numa, []).append((one.address, f"{one.name}  {one.kind}, {interface_rate(one)}"))
    for node in hardware.numa:
        out.print(indented(Text(f"NUMA {node.index}: {_node(hardware, node)}")))
        _devices(out, hardware, rows.pop(node.index, []))
    rest = [row for some in rows.values() for row in some]
    if rest:
        out.print("  of no NUMA node" if len(hardware.numa) > 1 else "  devices")
        _devices(out, hardware, rest)
    if hardware.nvml and hardware.gpus:
        out.print(indented(Text(hardware.nvml)))


def _node(hardware: Hardware, node: NumaNode) -> str:
    memory = f"{_gib(node.memory_bytes)} GiB"
    if node.gpu:
        label = next((gpu.label for gpu in hardware.gpus if gpu.address == node.gpu), f"GPU {node.gpu}")
        return f"memory of {label}, {memory}"
    return f"CPUs {node.cpus}, {memory}" if node.cpus else f"no CPUs, {memory}"


def _devices(out: Console, hardware: Hardware, rows: list[tuple[str, str]]) -> None:
    """By the root that they are below, in the order of the bus; those on one switch together."""
    above = ""
    for address, text in sorted(rows):
        path = hardware.pci[address].path if address in hardware.pci else ()
        # A switch's own upstream port comes after the root and the root's port.
        root = path[0] if len(path) > 1 else "unknown root"
        switch = f"switch {path[2]}" if len(path) > 4 else root
        if switch != above:
            out.print(f"    {switch}")
            above = switch
        out.print(Text(f"      {address or '-':<13} {printable(text)}", overflow="fold"))


def _port(port: RdmaPort) -> str:
    layer = "RoCE" if port.link_layer == "Ethernet" else "EFA" if port.is_efa else port.link_layer
    net = f", {port.netdev}" if port.netdev else ""
    return f"{layer} {port.gbit_s:g} Gb/s{'' if port.active else ', ' + port.state}{net}"


def _links(out: Console, hardware: Hardware) -> None:
    linked = [gpu for gpu in hardware.gpus if gpu.links]
    if linked:
        gpu = linked[0]
        speed = f" of {gpu.link_gb_s:.1f} GB/s" if gpu.link_gb_s else ""
        seen = f" over {hardware.nvswitches} NVSwitches" if hardware.nvswitches else ""
        over = (seen or " over NVSwitches") if gpu.switched else ""
        reach = "all GPUs reach each other so" if hardware.all_linked else "not all GPUs reach each other so"
        out.print(indented(f"NVLink: {gpu.links} links{speed} each{over}; {reach}"))
    else:
        why = hardware.nvml or "none is up"
        out.print(indented(f"NVLink: {why}"))
    ports = [port for port in hardware.rdma if port.address in hardware.pci]
    if len(hardware.gpus) + len(ports) < 2:
        return
    short = _short([gpu.address for gpu in hardware.gpus])
    heads = [gpu.label if gpu.index is not None else short[gpu.address] for gpu in hardware.gpus]
    named = [(gpu.label, gpu.address) for gpu in hardware.gpus] + [(port.device, port.address) for port in ports]
    rows = [(name, [_between(hardware, address, gpu) for gpu in hardware.gpus]) for name, address in named]
    _grid(out, heads, rows)
    words = {cell for _, cells in rows for cell in cells}
    used = {Distance[word] for word in words if word in Distance.__members__}
    nvlink = ["NV# NVLinks"] if linked else []
    out.print(indented("; ".join(nvlink + [_WORDS[one] for one in sorted(used)])))


def _grid(out: Console, heads: list[str], rows: list[tuple[str, list[str]]]) -> None:
    """Rows of cells below heads; what is too wide for the terminal as several tables, each with the rows' names."""
    room = out.width - 2 - max(len(name) for name, _ in rows) - 1
    wide = max(len(text) for text in (*heads, *(cell for _, cells in rows for cell in cells))) + 1
    fit = max(1, room // wide)
    for start in range(0, max(1, len(heads)), fit):
        table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
        for head in ("", *heads[start : start + fit]):
            table.add_column(head, no_wrap=True)
        for name, cells in rows:
            table.add_row(name, *cells[start : start + fit])
        out.print(indented(table))


def _short(addresses: list[str]) -> dict[str, str]:
    """Addresses by their bus where that tells them apart, else with the domain, else whole."""
    for pattern in (r".*?:(..):.*", r"(.*?:..):.*"):
        cut = {address: re.sub(pattern, r"\1", address) for address in addresses}
        if len(set(cut.values())) == len(cut):
            return cut
    return {address: address for address in addresses}


def _between(hardware: Hardware, address: str, gpu: Gpu) -> str:
    if address == gpu.address:
        return "-"
    own = next((one for one in hardware.gpus if one.address == address), None)
    if own is not None and hardware.linked(own, gpu):
        return f"NV{own.links}"
    distance = hardware.distance(address, gpu.address)
    return "?" if distance is None else distance.name


def _network(out: Console, hardware: Hardware) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for one in hardware.interfaces:
        notes = []
        if one.default_route:
            notes.append("default route")
        if one.members:
            notes.append(f"of {', '.join(one.members)}")
        shown = [address for address in one.addresses if not address.startswith("fe80")][:2]
        state = "up" if one.state == "unknown" and one.kind == "loopback" else one.state
        rate = "" if one.kind == "loopback" else interface_rate(one)
        table.add_row(one.name, one.kind, state, rate, Text("\n".join((*shown, *notes))))
    out.print(indented(table))
    for port in hardware.rdma:
        gids = [f"{gid.index} {gid.kind} {gid.ipv4}" for gid in port.gids if gid.ipv4]
        if gids:
            out.print(indented(f"{port.name} GIDs: {'; '.join(gids[:4])}"))
    if not hardware.rdma:
        cards = hardware.cards_without_driver
        found = f", though InfiniBand cards are on the bus: {', '.join(cards)}" if cards else ""
        out.print(indented(f"no RDMA device (InfiniBand, RoCE, EFA){found}"))


def _calibrations() -> list[tuple[Calibration | None, str]]:
    """What `meshwright plan --calibrate` and `bench comm` left here, by chip; or why a file is not used."""
    before = calibration_file("").stem
    chips = sorted(path.stem.removeprefix(before) for path in cache_folder().glob(f"{glob.escape(before)}*.json"))
    found = [read_calibration(chip) for chip in chips]
    return [(calibration, why) for calibration, why in found if calibration is not None or why]


def _measured(out: Console, found: list[tuple[Calibration | None, str]]) -> None:
    for calibration, why in found:
        if calibration is None:
            out.print(indented(Text(why)))
            continue
        out.print(indented(Text(f"{calibration.chip}, {calibration}")))
        beside(out, measured_rows(calibration), 4)
        if not calibration.crowds:
            out.print(indented(Text("speeds: `meshwright plan --calibrate`, in under two minutes"), 4))
    if not any(calibration for calibration, _ in found):
        advice = "speeds and collectives: `meshwright plan --calibrate`, in under two minutes"
        out.print(indented(Text(f"nothing yet. {advice}")))
    if not any(calibration and calibration.lines for calibration, _ in found):
        out.print(indented(Text("links by themselves: `meshwright bench comm`, also over several machines")))


def measured_rows(calibration: Calibration) -> list[tuple[str, str]]:
    """The most that was reached: products, memory, collectives at their largest size; and what links were measured."""
    rows = []
    for ranks, speeds in sorted(calibration.crowds.items()):
        best = [f"{dtype} {max(row[-1] for row in points) / 1e12:.3g}" for dtype, points in speeds.products.items()]
        text = f"{', '.join(best)} TFLOP/s; memory {speeds.memory / 1e9:.3g} GB/s"
        rows.append((f"{ranks} rank{'s' * (ranks > 1)}", f"{text}{' each' * (ranks > 1)}"))
        for kind, groups in speeds.collectives.items():
            for size, points in groups.items():
                largest, seconds = points[-1]
                if seconds > 0:
                    shown = f"{largest / 2**20:.3g} MiB in {seconds * 1e3:.3g} ms, {largest / seconds / 1e9:.3g} GB/s"
                    rows.append((f"  {kind} of {size}", shown))
    for line in calibration.lines:
        among = (
            f"{line.ranks}" if line.inside == line.ranks else f"{line.ranks} on {line.ranks // line.inside} machines"
        )
        reached = f"{line.latency_s * 1e6:.3g} us, {line.bandwidth / 1e9:.3g} GB/s on the bus"
        if line.bend is not None and line.beyond is not None:
            reached += f", {line.beyond / 1e9:.3g} above {line.bend / 2**20:.3g} MiB"
        rows.append((f"{line.operation} of {among}", f"{reached} ({line.backend}, {line.axis}, {line.when[:10]})"))
    return rows
