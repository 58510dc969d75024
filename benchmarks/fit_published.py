"""Finds the fitted numbers of src/meshwright/planning/constants.toml from published runs, and says how far they carry.

    python benchmarks/fit_published.py --write          fit on all complete rows and write the file
    python benchmarks/fit_published.py --cross          fit without each source in turn, and show the errors on it

What may be fitted is listed in FREE: shares of a chip's peaks, and habits of a family of software. There is nothing for
a row or a source. The search is coordinate descent on the mean of |log(estimate / measured)|, with more weight beyond
20%, and a pull towards where it starts, data/fit_start.toml: values from data sheets and microbenchmarks.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planning import software as constants_file
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants, Software, read_constants
from meshwright.planning.timing import Timer
from published import DATA, percentile, settle
from published_rows import Run, runs_of, source_of

START = Path(__file__).parent / "data/fit_start.toml"
BLACKWELL = ("b200", "b300", "gb200", "gb300")
FREE: dict[str, tuple[float, float]] = {
    **{f"chip.{chip}.gemm": (0.3, 0.95) for chip in ("a100", "h100", "h100-500w", *BLACKWELL)},
    **{f"chip.{chip}.fp8": (0.2, 0.9) for chip in ("h100", "h100-500w", *BLACKWELL)},
    **{f"chip.{chip}.fp4": (0.1, 0.8) for chip in ("gb200", "gb300")},
    "chip.h100.attention": (0.3, 0.7),
    "chip.b200+b300+gb200+gb300.attention": (0.15, 0.7),
    "chip.a100.portable_attention": (0.2, 0.7),
    "chip.h100.portable_attention": (0.1, 0.6),
    "chip.a100+a100-40.memory": (0.5, 0.95),
    "chip.h100+h100-500w.memory": (0.5, 0.95),
    "chip.b200+b300+gb200+gb300.memory": (0.4, 0.95),
    **{
        f"software.{family}.{name}": bounds
        for family in ("megatron", "fsdp", "deepspeed", "jax")
        for name, bounds in {
            "compute": (0.6, 1.2),
            "passes": (0.5, 4.0),
            "cast": (0.2, 5.0),
            "tp_exposed": (0.1, 1.5),
            "overlap": (0.2, 1.0),
            "contention": (0.01, 0.6),
            "host_s": (0.0001, 0.003),
            "step_s": (0.001, 0.5),
            "jitter": (0.0005, 0.02),
        }.items()
        if (family, name) not in (("megatron", "compute"), ("deepspeed", "cast"), ("deepspeed", "contention"))
        and not (family == "jax" and name in ("tp_exposed", "overlap", "contention", "host_s", "step_s", "jitter"))
    },
    "software.megatron.ep_exposed": (0.1, 1.5),
    "software.megatron.host_experts_s": (0.0003, 0.006),
    "software.megatron.pipeline": (0.05, 2.0),
    "software.deepspeed.pipeline": (0.05, 2.0),
    "chip.gb200+gb300.host": (0.2, 2.0),
    "common.nic": (0.4, 0.95),
    "common.all_to_all": (0.15, 0.95),
    "common.grouped": (0.4, 1.0),
    "common.rows": (4, 512),
    "common.unfused": (2, 20),
    "common.depth": (16, 400),
}
PULL = 0.004
"""Weight of the pull towards the values at the start, for each free number, of the squared logarithm of their ratio."""


def places(name: str) -> list[tuple[str, ...]]:
    """The entries of the table that a free number stands for."""
    kind, *rest = name.split(".")
    if kind == "common":
        return [(kind, *rest)]
    owners, field = ".".join(rest[:-1]), rest[-1]
    return [(kind, owner, field) for owner in owners.split("+")]


def get(table: dict[str, Any], place: Sequence[str]) -> float:
    """A number of the table."""
    for part in place:
        table = table[part]
    return float(table)  # type: ignore[arg-type]


def put(table: dict[str, Any], place: Sequence[str], value: float) -> None:
    """Change it."""
    for part in place[:-1]:
        if part not in table:
            return
        table = table[part]
    table[place[-1]] = value


class Case:
    """A run that is estimated over and over."""

    def __init__(self, run: Run, known: Constants) -> None:
        self.run = run
        self.scenario: Scenario = settle(run.scenario)
        family = known.software[run.family]
        self.changes = {
            name: value for name, value in vars(self.scenario.software).items() if value != getattr(family, name)
        }
        assert run.step_s is not None
        self.measured = run.step_s
        self.ratio = self._estimate(known, True) / self._estimate(known, False)

    def _estimate(self, known: Constants, simulate: bool) -> float:
        software: Software = known.software[self.run.family]
        if self.changes:
            software = replace(software, **self.changes)
        return Timer(replace(self.scenario, software=software), known).parts(simulate).total

    def error(self, known: Constants) -> float:
        """The logarithm of estimate over measured; the pipeline by its bound, times what a simulation made of it."""
        return math.log(self._estimate(known, False) * self.ratio / self.measured)

    def touched(self, name: str) -> bool:
        """Whether a free number can matter."""
        for place in places(name):
            if place[0] == "common":
                return True
            key = self.scenario.cluster.chip.key
            if place[0] == "chip" and LIKE.get(key, key) == place[1]:
                return True
            if place[0] == "software" and self.run.family == place[1]:
                return True
        return False


LIKE: dict[str, str] = constants_file.table()["like"]


def loss(error: float) -> float:
    """What an error costs."""
    return math.sqrt(error * error + 0.0009) + 1.5 * max(0.0, abs(error) - 0.2)


def fit(cases: Sequence[Case], table: dict[str, Any], sweeps: int, quiet: bool = False) -> dict[str, Any]:
    """The table with its free numbers changed to where the errors are least."""
    table = copy.deepcopy(table)
    start = {name: float(value) for name, value in tomllib.loads(START.read_text(encoding="utf-8")).items()}
    now = dict(start)
    for name, value in start.items():
        for place in places(name):
            put(table, place, value)
    known = read_constants(table)
    errors = [case.error(known) for case in cases]
    steps = dict.fromkeys(FREE, 0.15)
    matters = {name: [index for index, case in enumerate(cases) if case.touched(name)] for name in FREE}
    for sweep in range(sweeps):
        for name, (low, high) in FREE.items():
            indices = matters[name]
            if not indices:
                continue
            before = sum(loss(errors[index]) for index in indices) / len(cases) + _pull(now[name], start[name])
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                value = min(high, max(low, now[name] * factor))
                if value == now[name]:
                    continue
                for place in places(name):
                    put(table, place, value)
                tried = read_constants(table)
                found = {index: cases[index].error(tried) for index in indices}
                after = sum(map(loss, found.values())) / len(cases) + _pull(value, start[name])
                if after < before - 1e-7:
                    now[name] = value
                    for index, error in found.items():
                        errors[index] = error
                    steps[name] = min(0.3, steps[name] * 1.3)
                    break
                for place in places(name):
                    put(table, place, now[name])
            else:
                steps[name] *= 0.5
        if not quiet:
            absolute = [abs(math.expm1(error)) for error in errors]
            print(
                f"sweep {sweep + 1}: median {statistics.median(absolute):.3%}, p90 {percentile(absolute, 0.9):.3%}",
                flush=True,
            )
    for name, value in now.items():
        for place in places(name):
            put(table, place, float(f"{value:.3g}"))
    return table


def _pull(value: float, start: float) -> float:
    return PULL * math.log(value / start) ** 2


def cross(runs: Sequence[Run], table: dict[str, Any], sweeps: int) -> dict[str, list[float]]:
    """Errors on each source of constants that were fitted without it."""
    known = read_constants(table)
    cases = [Case(run, known) for run in runs]
    found: dict[str, list[float]] = {}
    for source in sorted({source_of(run.row) for run in runs}):
        held = [case for case in cases if source_of(case.run.row) == source]
        if len(held) < 5:
            continue
        fitted = read_constants(fit([case for case in cases if source_of(case.run.row) != source], table, sweeps, True))
        found[source] = [math.expm1(case.error(fitted)) for case in held]
        absolute = [abs(error) for error in found[source]]
        print(
            f"{source:45} {len(held):4} rows  median {statistics.median(absolute):6.1%}  "
            f"p90 {percentile(absolute, 0.9):6.1%}  bias {statistics.fmean(found[source]):+6.1%}",
            flush=True,
        )
    everything = [abs(error) for errors in found.values() for error in errors]
    print(f"all: median {statistics.median(everything):.1%}, p90 {percentile(everything, 0.9):.1%}")
    return found


def write(table: dict[str, Any], path: Path, rows: int) -> None:
    """Change the numbers of the file in place; its words stay."""
    lines, section = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[(.+)\]", line)
        if header:
            section = header.group(1)
        entry = re.fullmatch(r"(\w+) = ([-\d.e]+)(.*)", line)
        if entry and section != "like":
            place = (section, entry.group(1)) if section == "common" else (*section.split(".", 1), entry.group(1))
            value = get(table, place)
            if value != float(entry.group(2)):
                line = f"{entry.group(1)} = {value:g}{entry.group(3)}"
        lines.append(line)
    text = "\n".join(lines) + "\n"
    text = re.sub(r"# Fitted on \d+ rows", f"# Fitted on {rows} rows", text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Fit, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DATA)
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="write the constants that were found")
    parser.add_argument("--cross", action="store_true", help="leave out each source in turn instead")
    parser.add_argument("--json", type=Path, help="where to write the errors of --cross")
    args = parser.parse_args()
    table = constants_file.table()
    known = read_constants(table)
    runs = [run for run in runs_of(args.csv, known)[0] if run.complete and run.step_s is not None]
    if args.cross:
        found = cross(runs, table, args.sweeps)
        if args.json:
            args.json.write_text(json.dumps(found), encoding="utf-8")
        return
    fitted = fit([Case(run, known) for run in runs], table, args.sweeps)
    if args.write:
        write(fitted, Path(constants_file.__file__).parent / "constants.toml", len(runs))


if __name__ == "__main__":
    main()
