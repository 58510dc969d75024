"""Accelerators: what the vendor says about them, as data. The facts and their sources are in `chips.toml`. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.errors import UserError, nearest

MIB = 1 << 20
DTYPES = ("bf16", "fp16", "float32", "tf32", "float64", "fp8", "fp4")


@dataclass(frozen=True)
class Chip:
    """One accelerator and its place in a machine."""

    key: str
    name: str
    memory_mib: float
    """Memory that a program can see."""
    memory_bandwidth: float
    """GB/s."""
    tflops: Mapping[str, float] = field(hash=False)
    """Dense peak by dtype; a dtype that is not there is one that the chip does not compute in."""
    units: int
    """Multiprocessors."""
    link: float
    """GB/s to neighbours in the domain, one way."""
    domain: int
    """Chips that are linked so."""
    node: int
    """Chips of a machine."""
    nic: float
    """GB/s of the network for each chip, one way."""
    host_gib: float
    """Host memory for each chip."""
    source: str
    """Where the numbers come from."""
    aliases: tuple[str, ...] = ()

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_mib * MIB

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; a dtype that the chip lacks is a UserError."""
        if dtype not in self.tflops:
            raise UserError(f"{self.name} does not compute in {dtype}; it has {', '.join(self.tflops)}")
        return self.tflops[dtype] * 1e12


@cache
def chips() -> dict[str, Chip]:
    """All known chips by their short name."""
    table = tomllib.loads(files("meshwright.cluster").joinpath("chips.toml").read_text(encoding="utf-8"))
    return {key: make_chip(key, facts) for key, facts in table.items()}


def find_chip(name: str) -> Chip:
    """A chip by its short name or one of its other names."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    known = chips()
    if plain in known:
        return known[plain]
    for chip in known.values():
        if plain in chip.aliases:
            return chip
    raise UserError(
        f"unknown chip '{name}'{nearest(plain, known)}; known: {', '.join(known)}. "
        "To describe another one, write a cluster file (docs/plan.md): "
        "[chip] name, memory_mib, memory_bandwidth, tflops = {bf16 = ...}, link, domain, node, nic"
    )


def make_chip(key: str, facts: Mapping[str, Any]) -> Chip:
    """A chip of a table; what is missing or impossible is a UserError that names it."""
    values: dict[str, Any] = {
        "aliases": (),
        "source": "given",
        "name": key,
        "host_gib": 128,
        "units": 100,
        "domain": 8,
        "node": 8,
    }
    values |= dict(facts)
    names = {one.name for one in fields(Chip)} - {"key"}
    for name in values:
        if name not in names:
            raise UserError(
                f"chip '{key}': unknown key '{name}'{nearest(name, names)}; it has {', '.join(sorted(names))}"
            )
    # It stands in comments of the files that plans and launches write.
    if not isinstance(values["name"], str) or not values["name"].isprintable():
        raise UserError(f"chip {values['name']!r}: a name is one line of text; write another")
    missing = sorted(names - values.keys())
    if missing:
        raise UserError(f"chip '{key}': {', '.join(missing)} missing; give them as numbers")
    for name in ("memory_mib", "memory_bandwidth", "units", "link", "domain", "node", "nic", "host_gib"):
        check_positive(f"chip '{key}'", name, values[name])
    tflops = values["tflops"]
    if not isinstance(tflops, Mapping) or not tflops:
        raise UserError(f"chip '{key}': tflops must be a table of dtypes, such as {{ bf16 = 989 }}")
    for dtype, peak in tflops.items():
        if dtype not in DTYPES:
            raise UserError(
                f"chip '{key}': tflops has an unknown dtype '{dtype}'{nearest(str(dtype), DTYPES)}; "
                f"known: {', '.join(DTYPES)}"
            )
        check_positive(f"chip '{key}'", f"tflops.{dtype}", peak)
    return Chip(key=key, **{**values, "aliases": tuple(values["aliases"]), "tflops": dict(tflops)})


def check_positive(where: str, name: str, value: object) -> None:
    """Raise a UserError unless the value is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UserError(f"{where}: {name}={value!r} is impossible; give a number above 0")
