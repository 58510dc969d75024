"""`meshwright doctor` without options: versions, devices, limits, and what stands in the way of a run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

from meshwright._version import __version__
from meshwright.cli import doctor_nccl
from meshwright.cli.doctor_text import beside, console, heading, show_findings
from meshwright.cli.doctor_topology import machine
from meshwright.cluster.hardware import Hardware
from meshwright.comm.host_limits import HostLimits
from meshwright.comm.nccl_profile import Finding, Level, Profile
from meshwright.errors import UserError
from meshwright.torch_support import require_torch


def versions(hardware: Hardware) -> dict[str, str]:
    """Of what a run stands on."""
    torch = _installed("torch") or "not installed"
    return {
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "nccl": _nccl(torch),
        "gpu driver": hardware.gpu_driver or "none",
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl(torch: str) -> str:
    """By the package that came with PyTorch, which need not be imported for that; else by asking PyTorch."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if version := _installed(package):
            return version
    if torch == "not installed" or torch.endswith("+cpu"):
        return "none with this PyTorch"
    try:
        from torch.cuda import nccl

        return ".".join(str(part) for part in nccl.version())
    except (ImportError, AttributeError, RuntimeError):
        return "none with this PyTorch"


def check_versions() -> list[Finding]:
    """Whether PyTorch is there and of a supported version."""
    try:
        require_torch()
    except UserError as error:
        return [Finding(Level.BREAKS, "PyTorch", str(error))]
    return []


def show(
    hardware: Hardware, found: dict[str, str], limits: HostLimits, profile: Profile, findings: Sequence[Finding]
) -> None:
    """On the terminal."""
    out = console()
    beside(
        out,
        [
            ("machine", f"{hardware.host}: {machine(hardware)}"),
            ("devices", doctor_nccl.gpus(hardware) + _linked(hardware)),
            ("network", doctor_nccl.summary(hardware)),
            ("versions", ", ".join(f"{name} {version}" for name, version in found.items())),
            ("limits", limits_text(limits)),
        ],
        0,
    )
    if hardware.gpus:
        heading(out, "NCCL, for runs on several machines")
        doctor_nccl.brief(out, profile)
    every = sorted([*findings, *profile.findings], key=lambda finding: list(Level).index(finding.level))
    if every:
        heading(out, "what is wrong")
        show_findings(out, every)
    counts = {level: sum(finding.level is level for finding in every) for level in Level}
    out.print()
    if counts[Level.BREAKS]:
        out.print(f"not fit: {counts[Level.BREAKS]} would break a run, {counts[Level.WARNING]} warnings")
    else:
        warnings = counts[Level.WARNING]
        out.print(f"fit to train{f', with {warnings} warning' if warnings else ''}{'s' * (warnings > 1)}")
    out.print("more: meshwright doctor --topology, meshwright doctor --nccl")


def _linked(hardware: Hardware) -> str:
    if len(hardware.gpus) < 2:
        return ""
    return ", all joined by NVLinks" if hardware.all_linked else ", not all joined by NVLinks"


def limits_text(limits: HostLimits) -> str:
    """In words."""
    locked = "any" if limits.locked_bytes is None else f"{limits.locked_bytes / 2**20:,.4g} MiB"
    files = "any number of" if limits.open_files is None else f"{limits.open_files:,}"
    shared = "no" if limits.shared_bytes is None else f"{limits.shared_bytes / 2**30:,.1f} GiB"
    return f"locked memory {locked}; {files} open files; /dev/shm {shared}"
