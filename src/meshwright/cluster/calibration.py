"""What was measured on a machine: its form, the file it is kept in, and how to read numbers between measured ones.

`meshwright plan --calibrate` writes one file for each machine and chip, and `meshwright bench comm` adds its lines to
it; each leaves what the other wrote. A file that is damaged or of another form is as if it were not there, and the
answer says so. No torch.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite, log
from pathlib import Path
from typing import Any

from meshwright.cluster.link_lines import LinkLine, read_lines, with_newer
from meshwright.files import cache_folder, write_atomically

FORM = 2
CROWDS = (1, 2, 4, 8)
"""Ranks on CPU cores that are measured at work at the same time."""
Points = tuple[tuple[float, ...], ...]
"""Rows of numbers; what they are says who uses them. A row's last number is what was measured."""


@dataclass(frozen=True)
class Speeds:
    """What one rank reaches while that many ranks of its machine work at the same time."""

    ranks: int
    products: Mapping[str, Points]
    """By dtype: rows, inner, outer, FLOP/s of a matrix product."""
    attention: Mapping[str, Points]
    """By dtype: tokens of a sequence, FLOP/s of fused attention's forward pass, the causal half counted."""
    attention_backward: Mapping[str, Points]
    """The same of its backward pass: 2.5 times the FLOPs of the forward pass."""
    memory: float
    """Bytes per second, read and written."""
    passes: Mapping[str, float]
    """By dtype: how often a layer's activations go through memory, over the least it takes."""
    layer_s: tuple[float, ...]
    """Least seconds of a layer's forward and backward pass: what the host takes to start its operations."""
    experts_s: tuple[float, ...]
    """The same for a layer of experts."""
    optimizer_s: float
    """For each parameter that is updated."""
    step_s: float
    """What a step costs beside its passes."""
    micro_s: float
    """What a micro-step costs beside its layers: embedding, head and loss, however small."""
    collectives: Mapping[str, Mapping[str, Points]]
    """By kind and size of the group: bytes, seconds, as it comes between other work."""
    axes: Mapping[str, Mapping[str, float]]
    """By axis and size of the group: seconds that an exchange of next to nothing adds to training."""

    def scaled(self, factor: float) -> Speeds:
        """All of it that many times as slow."""

        def slower(rows: Points) -> Points:
            return tuple((*row[:-1], row[-1] / factor) for row in rows)

        return replace(
            self,
            products={dtype: slower(rows) for dtype, rows in self.products.items()},
            attention={dtype: slower(rows) for dtype, rows in self.attention.items()},
            attention_backward={dtype: slower(rows) for dtype, rows in self.attention_backward.items()},
            memory=self.memory / factor,
            layer_s=tuple(value * factor for value in self.layer_s),
            experts_s=tuple(value * factor for value in self.experts_s),
            optimizer_s=self.optimizer_s * factor,
            step_s=self.step_s * factor,
            micro_s=self.micro_s * factor,
            collectives={
                kind: {size: tuple((row[0], row[1] * factor) for row in rows) for size, rows in groups.items()}
                for kind, groups in self.collectives.items()
            },
            axes={axis: {size: value * factor for size, value in of.items()} for axis, of in self.axes.items()},
        )


@dataclass(frozen=True)
class Calibration:
    """A machine, and what its ranks reach in crowds of several sizes."""

    host: str
    chip: str
    """Key of the chip in the table of chips."""
    torch: str
    when: str
    crowds: Mapping[int, Speeds]
    """By their size; none where only links were measured."""
    lines: tuple[LinkLine, ...] = ()
    """What `bench comm` measured."""

    @property
    def links(self) -> tuple[LinkLine, ...]:
        """Lines of the backend over which such chips train."""
        return tuple(line for line in self.lines if line.backend == ("gloo" if self.chip == "cpu" else "nccl"))

    def of(self, ranks: int, cores: int) -> Speeds:
        """For that many ranks on so many cores: those of the next larger crowd; of the largest, if there is none.

        That one is slowed down as far as ranks share cores that it did not have to share.
        """
        larger = [size for size in sorted(self.crowds) if size >= ranks]
        if larger:
            return self.crowds[larger[0]]
        most = max(self.crowds)
        return self.crowds[most].scaled(max(1.0, ranks / cores) / max(1.0, most / cores))

    def __str__(self) -> str:
        if not self.crowds:
            return f"links measured on {self.host}, {max(line.when for line in self.lines)[:10]}, nothing else"
        return f"calibrated on {self.host}, {self.when[:10]}, torch {self.torch}"


def calibration_file(chip: str = "cpu") -> Path:
    """Where what was measured on this machine's chips of that kind is kept."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return cache_folder() / f"calibration-{host}-{chip}.json"


def write_calibration(calibration: Calibration) -> Path:
    """Keep it for later plans; gives where."""
    path = calibration_file(calibration.chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"form": FORM, **asdict(calibration)}
    write_atomically(path, json.dumps(table, indent=1, allow_nan=False) + "\n")
    return path


def write_lines(chip: str, lines: Sequence[LinkLine]) -> tuple[Path, str]:
    """Add lines to what is kept of this machine's chips of that kind; gives where, and what was lost of a bad file."""
    before, ignored = read_calibration(chip)
    if before is None:
        before = Calibration(socket.gethostname(), chip, lines[0].torch, lines[0].when, {})
    return write_calibration(replace(before, lines=with_newer(before.lines, lines))), ignored


def read_calibration(chip: str = "cpu") -> tuple[Calibration | None, str]:
    """What was measured here on that chip, or None; and, where a file was passed over, why."""
    path = calibration_file(chip)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read ({error}) and is ignored; `meshwright plan --calibrate` writes it anew"
    again = "and is ignored; `meshwright plan --calibrate` writes it anew"
    try:
        table = json.loads(text)
        if table["form"] != FORM:
            return None, f"{path} is of form {table['form']}, not {FORM}, {again}"
        if table["chip"] != chip:
            return None, f"{path} is of chip {table['chip']}, not {chip}, {again}"
        crowds = {int(size): _speeds(values) for size, values in table["crowds"].items()}
        # Files from before lines were kept have none.
        lines = read_lines(table.get("lines", ()))
        if not crowds and not lines:
            raise ValueError("it has no measurements")
        return Calibration(table["host"], chip, str(table["torch"]), str(table["when"]), crowds, lines), ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{path} is damaged ({type(error).__name__}: {error}) {again}"


def _speeds(table: Mapping[str, Any]) -> Speeds:
    """Speeds of a table; whatever is not a number where one belongs is a ValueError."""
    names = {one.name for one in fields(Speeds)}
    if table.keys() != names:
        raise ValueError(f"keys differ: {', '.join(sorted(names ^ table.keys()))}")
    _check_numbers(table)
    for name in ("products", "attention", "attention_backward"):
        if not table[name] or not all(table[name].values()):
            raise ValueError(f"{name} is empty")
    for name in ("layer_s", "experts_s"):
        if len(table[name]) != 2:
            raise ValueError(f"{name} has {len(table[name])} numbers, not 2")
    values = dict(table)
    for name in ("products", "attention", "attention_backward"):
        values[name] = {dtype: _points(rows) for dtype, rows in table[name].items()}
    values |= {name: tuple(table[name]) for name in ("layer_s", "experts_s")}
    values["collectives"] = {
        kind: {str(int(size)): _points(rows) for size, rows in groups.items()}
        for kind, groups in table["collectives"].items()
    }
    values["axes"] = {axis: {str(int(size)): one for size, one in of.items()} for axis, of in table["axes"].items()}
    return Speeds(**values)


def _points(rows: Sequence[Sequence[float]]) -> Points:
    return tuple(sorted(tuple(float(value) for value in row) for row in rows))


def _check_numbers(value: Any) -> None:
    if isinstance(value, Mapping):
        for one in value.values():
            _check_numbers(one)
    elif isinstance(value, list | tuple):
        for one in value:
            _check_numbers(one)
    elif isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no measurement")


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a place among (place, value), even on a logarithmic scale of places; beyond the ends, theirs."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if at <= right:
            share = log(at / left) / log(right / left)
            return low + (high - low) * share
    return points[-1][1]


def seconds_of(points: Points, size: float) -> float:
    """Of a collective of that many bytes: straight lines between measured sizes, and on beyond the last."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    last = next((index for index, point in enumerate(points) if size <= point[0]), len(points) - 1)
    (left, low), (right, high) = points[last - 1], points[last]
    return low + max(0.0, high - low) * (size - left) / (right - left)


def at_group(values: Mapping[str, Any], size: int) -> str:
    """The measured group that is nearest to that many ranks: the next larger one, or the largest."""
    sizes = sorted(int(one) for one in values)
    return str(next((one for one in sizes if one >= size), sizes[-1]))
