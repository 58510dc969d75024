"""Is this machine fit to train? What it has, what was measured on it, and whether NCCL's settings suit it.

Without options: versions, devices, limits, and both parts in brief."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.cluster.recording import opened, record
from meshwright.cluster.sysfs import read_hardware
from meshwright.comm.host_limits import check_limits, read_limits
from meshwright.comm.nccl_profile import Finding, Level, Profile, nccl_profile
from meshwright.comm.nccl_variables import given_settings
from meshwright.errors import ExitCode, UserError
from meshwright.printable import printable


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright doctor`."""
    parser.add_argument("--topology", action="store_true", help="what was found: NUMA, PCIe, NVLink, network; measured")
    parser.add_argument("--nccl", action="store_true", help="settings for NCCL: what to set and why, what is wrong")
    parser.add_argument(
        "--nodes",
        type=int,
        default=2,
        metavar="N",
        help="with --nccl: machines of the run (default 2, that is several)",
    )
    parser.add_argument(
        "--format", choices=("text", "json", "env"), help="text (default); json; env: lines for a shell, with --nccl"
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="PATH",
        help="with --topology or --nccl: a recorded machine instead, a file of --record or a folder with sys and proc",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write all that is read of this machine to a file of text, for a report or for --root elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="short for --format json")
    parser.epilog = (
        "exit code: 0 fit, perhaps with warnings; 1 something would break a run; 2 something to change in the\n"
        "command\n\n"
        "examples:\n"
        "  meshwright doctor\n"
        "  meshwright doctor --topology\n"
        '  eval "$(meshwright doctor --nccl --format env)"\n'
        "  meshwright doctor --nccl --nodes 256 --json\n"
        "  meshwright doctor --record node17.json\n"
    )


def run(args: argparse.Namespace) -> int:
    """Look, and tell."""
    form = "json" if args.json and args.format is None else args.format or "text"
    if args.json and form != "json":
        raise UserError("--json is --format json; leave one of the two out")
    if args.nodes < 1:
        raise UserError("--nodes takes a whole number from 1")
    if form == "env" and (not args.nccl or args.topology):
        raise UserError("--format env is for --nccl alone")
    whole = not args.topology and not args.nccl
    if args.record is not None and (not whole or args.json or args.format is not None):
        raise UserError("--record goes alone, or with --root; it takes all that --topology and --nccl look at")
    if args.root is not None:
        _check_root(args.root, whole and args.record is None)
    with opened(Path("/") if args.root is None else args.root) as root:
        if args.record is not None:
            return _record(root, args.record)
        return _tell(root, args, form, whole)


def _tell(root: Path, args: argparse.Namespace, form: str, whole: bool) -> int:
    recorded = root != Path("/")
    hardware = read_hardware(root)
    profile = nccl_profile(hardware, given_settings(os.environ, root), args.nodes, partial(_exists, root))
    from meshwright.cli import doctor_nccl, doctor_overview, doctor_topology

    limits = read_limits()
    limited = list(check_limits(limits, hardware)) if whole else []
    versions = doctor_overview.versions(hardware) if whole else {}
    troubles = doctor_overview.check_versions() if whole else []
    if form == "env":
        print(doctor_nccl.shell_lines(profile), end="")
    elif form == "json":
        parts: dict[str, Any] = {"host": hardware.host}
        if whole:
            parts |= {"versions": versions, "limits": asdict(limits)}
            parts["findings"] = [asdict(finding) for finding in (*troubles, *limited)]
        if args.topology or whole:
            parts["topology"] = doctor_topology.as_json(hardware, recorded)
        if args.nccl or whole:
            parts["nccl"] = profile.as_json()
        json.dump(parts, sys.stdout, indent=1)
        print()
    else:
        if whole:
            doctor_overview.show(hardware, versions, limits, profile, [*troubles, *limited])
        if args.topology:
            doctor_topology.show(hardware, recorded)
        if args.nccl:
            doctor_nccl.show(hardware, profile, args.nodes)
    return _code(profile if whole or args.nccl else None, [*troubles, *limited])


def _record(root: Path, file: Path) -> int:
    from meshwright.cli.doctor_topology import machine

    text = record(root, machine, os.environ)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--record cannot write {file}: {error.strerror}; name another place") from error
    shown = printable(str(file))
    print(f"{shown}: {len(text) / 1024:,.0f} KiB of text, with this machine's name and IP addresses, without hardware")
    print("addresses and serial numbers. Look at it before you pass it on.")
    print(f"meshwright doctor --topology --root {shlex.quote(shown)} shows what it tells.")
    return ExitCode.DONE


def _check_root(root: Path, whole: bool) -> None:
    wanted = "--root takes a file of --record, or a folder that holds a machine's sys and proc"
    if whole:
        raise UserError(f"{wanted}, and goes with --topology or --nccl")
    try:
        if root.is_file():
            return
        missing = [name for name in ("sys", "proc") if not (root / name).is_dir()]
        lacks = "holds neither sys nor proc" if len(missing) == 2 else f"holds no {''.join(missing)}"
        if not root.is_dir():
            lacks = "is neither" if root.exists() else "is not there"
    except OSError as error:
        raise UserError(f"{wanted}: {error.strerror}") from error
    if missing:
        raise UserError(f"{wanted}, and {root} {lacks}")


def _exists(root: Path, path: Path) -> bool:
    return (root / path.relative_to("/") if path.is_absolute() else path).exists()


def _code(profile: Profile | None, findings: list[Finding]) -> int:
    broken = any(finding.level is Level.BREAKS for finding in findings) or (profile is not None and profile.breaks)
    return ExitCode.FAILED if broken else ExitCode.DONE
