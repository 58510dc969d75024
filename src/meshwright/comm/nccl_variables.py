"""Environment variables of NCCL, of PyTorch's use of it and of gloo, and what NCCL makes of a value. No torch.

The names are in nccl_variables.toml, from NCCL's source. Settings come from the environment or, where it has none, from
NCCL's files: $NCCL_CONF_FILE or ~/.nccl.conf, and /etc/nccl.conf.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Only variables that begin so are looked at or shown: others may hold secrets."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("meshwright.comm") / "nccl_variables.toml").read_text(encoding="utf-8"))


@cache
def known_names() -> frozenset[str]:
    """All that are read by NCCL, PyTorch or gloo."""
    table = _table()
    torch = (f"TORCH_NCCL_{name}" for name in table["torch"])
    return frozenset((*table["numbers"], *table["texts"], *torch, *table["gloo"]))


def is_foreign(name: str) -> bool:
    """Whether a name belongs to a plugin, a tool or a build, of which nothing is known here."""
    return name.startswith(tuple(_table()["others"]))


def successor(name: str) -> tuple[str, bool] | None:
    """Which name does now what this one once did, and whether the old one still does; None where there is none."""
    table = _table()
    for kind in ("deprecated", "former"):
        if name in table[kind]:
            return str(table[kind][name]), kind == "deprecated"
    return None


def is_number(name: str) -> bool:
    """Whether NCCL reads the value as a whole number."""
    return name in _table()["numbers"] or name in _table()["limits"]


def limits(name: str) -> tuple[int, int] | None:
    """The least and the largest value that make sense."""
    found = _table()["limits"].get(name)
    return None if found is None else (int(found[0]), int(found[1]))


def words(name: str) -> tuple[str, ...]:
    """Words that the value may be made of; empty where any will do."""
    return tuple(_table()["words"].get(name, ()))


def nccl_version() -> str:
    """The version of NCCL that the names are of."""
    return str(_table()["nccl"])


def number_in(value: str) -> int:
    """What NCCL reads a value as: by C's strtoll with any base, which stops at what is no digit; nothing is 0."""
    found = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", value)
    if found is None:
        return 0
    digits = found[2].lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    # Twenty digits are past where strtoll ends, and Python reads no more than some thousands.
    number = int(digits[:20] if base == 10 else digits, base) * (-1 if found[1] == "-" else 1)
    return max(-(2**63), min(number, 2**63 - 1))


def is_whole_number(value: str) -> bool:
    """Whether a value is a number and nothing else."""
    return re.fullmatch(r"\s*[+-]?(0[xX][0-9a-fA-F]+|\d+)\s*", value, re.ASCII) is not None


@dataclass(frozen=True)
class Given:
    """A setting that somebody made, and where."""

    value: str
    origin: str = "the environment"


def given_settings(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, Given]:
    """All settings of these three that are in force, from the environment and NCCL's files."""
    found = {name: Given(value) for name, value in environment.items() if name.startswith(PREFIXES)}
    own = environment.get("NCCL_CONF_FILE") or (f"{environment['HOME']}/.nccl.conf" if environment.get("HOME") else "")
    for path in filter(None, (own, "/etc/nccl.conf")):
        for name, value in _file_settings(root / path.lstrip("/")).items():
            found.setdefault(name, Given(value, path))
    return dict(sorted(found.items()))


def _file_settings(path: Path) -> dict[str, str]:
    """NAME=value lines; the first of a name counts, as in NCCL, which overwrites nothing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    found: dict[str, str] = {}
    for name, value in pairs:
        if name.startswith(PREFIXES):
            found.setdefault(name, value)
    return found
