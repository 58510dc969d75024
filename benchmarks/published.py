"""Estimates against published, measured training runs: step time, peak memory, out-of-memory verdicts.

    python benchmarks/published.py [--csv FILE] [--json OUT]

Takes any file with the columns of benchmarks/data/published_runs.csv. Rows that the estimates cannot take are listed
with the reason. The figures at the top are over rows that give the whole configuration; rows that had to be completed
(by the published model's shape, by a default that a note names) are a group of their own. Errors are (estimate -
measured) / measured of a step's time and of the memory metric that the source reports.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.planning.memory import Memory, memory_of
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants, constants
from meshwright.planning.state_memory import GIB
from meshwright.planning.timing import Timer
from published_rows import UNSTATED, Run, runs_of

DATA = Path(__file__).parent / "data/published_runs.csv"
BY = ("source", "gpu", "scale", "strategy", "software")


@dataclass(frozen=True)
class Estimate:
    """A run, and what is estimated for it."""

    run: Run
    step_s: float
    memory: Memory
    recompute: str

    @property
    def time_error(self) -> float | None:
        measured = self.run.step_s
        return None if measured is None else (self.step_s - measured) / measured

    @property
    def memory_gib(self) -> float:
        """The metric that the source reports, of the fullest rank."""
        terms = self.memory.stages[self.memory.fullest]
        kind = self.run.memory_kind
        return {"allocated": terms.allocated, "reserved": terms.reserved}.get(kind, terms.total) / GIB

    @property
    def memory_error(self) -> float | None:
        measured = self.run.memory_gib
        return None if measured is None else (self.memory_gib - measured) / measured


def settle(scenario: Scenario) -> Scenario:
    """The scenario with the least recompute that fits, where the source does not say what was recomputed."""
    if scenario.layout.recompute != UNSTATED:
        return scenario
    layers = scenario.spec.num_hidden_layers
    choices = ["none", "selective", *(f"first:{layers * part // 8}" for part in range(1, 8)), "full"]
    for choice in choices:
        tried = replace(scenario, layout=replace(scenario.layout, recompute=choice))
        if memory_of(tried).hard_share <= 1:
            return tried
    return tried


def estimate(run: Run, known: Constants, simulate: bool = True) -> Estimate:
    """What the planner says about a run."""
    scenario = settle(run.scenario)
    parts = Timer(scenario, known).parts(simulate)
    return Estimate(run, parts.total, memory_of(scenario), scenario.layout.recompute)


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, ties sharing their rank."""
    if len(pairs) < 3:
        return None
    first, second = _ranks([pair[0] for pair in pairs]), _ranks([pair[1] for pair in pairs])
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    count = {value: ordered.count(value) for value in set(ordered)}
    return [ordered.index(value) + (count[value] - 1) / 2 for value in values]


def time_summary(found: Iterable[Estimate]) -> dict[str, Any]:
    """Errors of step times."""
    found = [one for one in found if one.time_error is not None]
    summary = _errors([one.time_error or 0.0 for one in found])
    pairs = [(1 / one.step_s, 1 / (one.run.step_s or 1.0)) for one in found]
    speeds = [
        (tokens * fast, tokens * slow)
        for (fast, slow), tokens in zip(
            pairs,
            [
                one.run.scenario.global_batch * one.run.scenario.sequence_length / one.run.scenario.layout.world
                for one in found
            ],
            strict=True,
        )
    ]
    return summary | {"rank_correlation": rank_correlation(speeds)}


def memory_summary(found: Iterable[Estimate]) -> dict[str, Any]:
    """Errors of peak memory."""
    return _errors([one.memory_error for one in found if one.memory_error is not None])


def _errors(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"rows": 0} | dict.fromkeys(("median_abs_error", "mean_abs_error", "p90_abs_error", "bias"))
    absolute = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median_abs_error": statistics.median(absolute),
        "mean_abs_error": statistics.fmean(absolute),
        "p90_abs_error": percentile(absolute, 0.9),
        "bias": statistics.fmean(errors),
    }


def verdict_summary(found: Iterable[Estimate]) -> dict[str, Any]:
    """How many out-of-memory runs are called tight or worse, and how many that ran are called not fitting."""
    found = list(found)
    out = [one for one in found if one.run.out_of_memory]
    ran = [one for one in found if one.run.ran and one.run.scenario.layout.recompute != UNSTATED]
    caught = sum(one.memory.verdict != "fits" for one in out)
    refused = sum(one.memory.verdict == "does not fit" for one in ran)
    return {
        "out_of_memory": len(out),
        "called_tight_or_not_fitting": caught,
        "share_caught": caught / len(out) if out else None,
        "ran": len(ran),
        "called_not_fitting": refused,
        "share_refused": refused / len(ran) if ran else None,
    }


def summarise(found: Sequence[Estimate]) -> dict[str, Any]:
    """All three."""
    return {"time": time_summary(found), "memory": memory_summary(found), "verdicts": verdict_summary(found)}


def evaluate(path: Path, known: Constants) -> tuple[list[Estimate], list[dict[str, Any]]]:
    """Estimates of a file's rows, and those that were left out."""
    runs, skipped = runs_of(path, known)
    found = []
    for run in runs:
        try:
            found.append(estimate(run, known))
        except (ValueError, ArithmeticError, AssertionError, LookupError) as error:
            reason = f"cannot be estimated: {error}"
            skipped.append(
                {"line": run.number, "source": run.groups()["source"], "complete": run.complete, "reason": reason}
            )
    return found, skipped


def report(found: Sequence[Estimate], skipped: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is written as JSON."""
    complete = [one for one in found if one.run.complete]
    left_out = [one for one in skipped if one["complete"]]
    result = summarise(complete)
    # Whether a run fits is known for few rows, so those that had to be completed count too.
    result["verdicts"] = verdict_summary(found)
    result["coverage"] = {
        "complete_rows": len(complete) + len(left_out),
        "used": len(complete),
        "completed": len(found) - len(complete),
        "share": len(complete) / max(1, len(complete) + len(left_out)),
    }
    result["completed_rows"] = summarise([one for one in found if not one.run.complete])
    result["groups"] = {
        kind: {
            name: summarise([one for one in complete if one.run.groups()[kind] == name])
            | {"skipped": sum(one["complete"] and kind == "source" and one["source"] == name for one in skipped)}
            for name in sorted({one.run.groups()[kind] for one in complete})
        }
        for kind in BY
    }
    result["skipped"] = list(skipped)
    return result


def show(result: dict[str, Any]) -> None:
    """The report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    for kind in BY:
        table = Table(title=f"by {kind}", title_justify="left", box=None)
        for name in (
            kind,
            "rows",
            "skipped",
            "median",
            "mean",
            "p90",
            "bias",
            "rank corr.",
            "memory rows",
            "median",
            "bias",
        ):
            table.add_column(name, justify="left" if name == kind else "right")
        for name, group in result["groups"][kind].items():
            time, memory = group["time"], group["memory"]
            table.add_row(
                name,
                str(time["rows"]),
                str(group["skipped"]) if kind == "source" else "",
                *_cells(time),
                _number(time.get("rank_correlation")),
                str(memory["rows"]),
                _percent(memory.get("median_abs_error")),
                _percent(memory.get("bias"), True),
            )
        console.print(table)
        console.print()
    reasons: dict[str, list[int]] = {}
    for one in result["skipped"]:
        counts = reasons.setdefault(one["reason"], [0, 0])
        counts[0] += 1
        counts[1] += one["complete"]
    table = Table(title="skipped", title_justify="left", box=None)
    for name in ("reason", "rows", "of them complete"):
        table.add_column(name, justify="left" if name == "reason" else "right")
    for reason, (rows, complete) in sorted(reasons.items(), key=lambda one: -one[1][0]):
        table.add_row(reason, str(rows), str(complete))
    console.print(table)
    time, memory, verdicts, coverage = (result[name] for name in ("time", "memory", "verdicts", "coverage"))
    console.print(f"\ncomplete rows used: {coverage['used']} of {coverage['complete_rows']} ({coverage['share']:.0%})")
    console.print(
        f"step time: {time['rows']} rows, median |error| {_percent(time.get('median_abs_error'))}, "
        f"p90 {_percent(time.get('p90_abs_error'))}, bias {_percent(time.get('bias'), True)}"
    )
    console.print(
        f"memory:    {memory['rows']} rows, median |error| {_percent(memory.get('median_abs_error'))}, "
        f"p90 {_percent(memory.get('p90_abs_error'))}, bias {_percent(memory.get('bias'), True)}"
    )
    extra = result["completed_rows"]
    console.print(
        f"completed: {extra['time']['rows']} rows, median |time error| "
        f"{_percent(extra['time'].get('median_abs_error'))}; "
        f"{extra['memory']['rows']} rows, median |memory error| {_percent(extra['memory'].get('median_abs_error'))}"
    )
    console.print(
        f"verdicts:  {verdicts['called_tight_or_not_fitting']} of {verdicts['out_of_memory']} out-of-memory runs "
        f"called tight or not fitting; {verdicts['called_not_fitting']} of {verdicts['ran']} that ran called "
        "not fitting"
    )


def _cells(summary: dict[str, Any]) -> list[str]:
    names = ("median_abs_error", "mean_abs_error", "p90_abs_error")
    return [*(_percent(summary.get(name)) for name in names), _percent(summary.get("bias"), True)]


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def line_of(one: Estimate) -> str:
    """A row with its estimate."""
    row, layout = one.run.row, one.run.scenario.layout
    axes = " ".join(f"{name}={getattr(layout, name)}" for name in ("dp", "zero", "tp", "pp", "cp", "ep"))
    known = [
        one.run.number,
        one.run.groups()["source"],
        row.get("model", ""),
        f"s={row.get('seq_len', '')}",
        axes,
        one.recompute,
    ]
    known += [one.run.scenario.precision, f"{one.step_s:.3f} s", _percent(one.time_error, True)]
    known += [f"{one.memory_gib:.1f} GiB", _percent(one.memory_error, True), "complete" if one.run.complete else ""]
    return " ".join(map(str, known))


def main() -> None:
    """Evaluate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DATA, help="the runs (default: those of this repository)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rows", action="store_true", help="print every row with its estimate")
    args = parser.parse_args()
    try:
        found, skipped = evaluate(args.csv, constants())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"{args.csv} cannot be read as a table in UTF-8: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    result = report(found, skipped)
    if args.rows:
        for one in found:
            print(line_of(one))
    show(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
