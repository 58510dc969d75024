"""`meshwright doctor --nccl`: the settings for a reader, and as lines for a shell."""

from __future__ import annotations

import shlex

from rich.console import Console

from meshwright.cli.doctor_text import below, beside, console, heading, show_findings
from meshwright.cluster.hardware import Hardware, interface_rate, rates
from meshwright.comm.nccl_profile import Kept, Profile
from meshwright.comm.nccl_selection import fabric_ports
from meshwright.printable import printable


def shell_lines(profile: Profile) -> str:
    """`export NAME=value` for what would be set, and the rest as comments."""
    lines = []
    for setting in profile.settings:
        lines += [f"# {printable(setting.reason)}", f"export {setting.name}={_quoted(printable(setting.value))}"]
    lines += [f"# kept, set in {printable(kept.origin)}: {printable(kept.name)}" for kept in profile.kept]
    for finding in profile.findings:
        cost = f"; {finding.cost}" if finding.cost else ""
        lines.append(f"# {finding.level}: {printable(finding.about)}: {printable(finding.text + cost)}")
    return "".join(f"{line}\n" for line in lines)


def _quoted(value: str) -> str:
    # Some shells take a word that begins with = for the name of a command.
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def summary(hardware: Hardware) -> str:
    """The network in one line."""
    fabric = fabric_ports(hardware)
    if fabric:
        return f"{rates(fabric)} {'RoCE' if fabric[0].link_layer == 'Ethernet' else fabric[0].link_layer}"
    efa = [port for port in hardware.rdma if port.is_efa]
    if efa:
        return f"{rates(efa)} EFA"
    usable = [one for one in hardware.interfaces if one.usable]
    if not usable:
        return "no network"
    best = max(usable, key=lambda one: (one.mbit_s or 0, one.default_route))
    return f"no RDMA, {best.name} of {interface_rate(best)}"


def show(hardware: Hardware, profile: Profile, machines: int) -> None:
    """All of it on the terminal."""
    out = console()
    runs = "one machine" if machines == 1 else "several machines" if machines == 2 else f"{machines} machines"
    out.print(f"NCCL on {hardware.host}, for runs on {runs}: {gpus(hardware)}; {summary(hardware)}")
    if profile.findings:
        heading(out, "what is wrong")
        show_findings(out, profile.findings)
    if profile.settings:
        heading(out, "would set")
        for setting in profile.settings:
            below(out, f"{setting.name}={setting.value}", setting.reason)
    if profile.kept:
        heading(out, "yours, kept")
        for kept in profile.kept:
            _show_kept(out, kept)
    if profile.questions:
        heading(out, "to find out")
        for question in profile.questions:
            below(out, question.name, question.reason)
    if profile.left:
        heading(out, "looked at, and left to the defaults")
        for left in profile.left:
            below(out, left.name, left.reason, "")
    if profile.settings:
        out.print('\neval "$(meshwright doctor --nccl --format env)" sets them in a shell.')


def _show_kept(out: Console, kept: Kept) -> None:
    where = "" if kept.origin == "the environment" else f"from {kept.origin}"
    if kept.agrees:
        text = "as we would set it"
    elif kept.agrees is False:
        text = f"we would set {kept.ours}: {kept.reason}"
    else:
        text = ""
    below(out, f"{kept.name}={kept.value}", "; ".join(filter(None, (where, text))))


def gpus(hardware: Hardware) -> str:
    """`8 x NVIDIA H100`, by name."""
    if not hardware.gpus:
        return "no NVIDIA GPU"
    names: dict[str, int] = {}
    for gpu in hardware.gpus:
        name = gpu.name or "NVIDIA GPU"
        names[name] = names.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def brief(out: Console, profile: Profile) -> None:
    """A few lines for the overview."""
    names = ", ".join(setting.name for setting in profile.settings) or "nothing"
    rows = [("would set", names)]
    if profile.kept:
        rows.append(("yours, kept", ", ".join(kept.name for kept in profile.kept)))
    if profile.questions:
        rows.append(("to find out", ", ".join(question.name for question in profile.questions)))
    beside(out, rows)
