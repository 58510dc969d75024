"""A view of runs as JSON for a page: few enough points, no more events than a page can show, and what has changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.observe.comparison import Pair
from meshwright.observe.curves import SERIES, Curves, number
from meshwright.observe.efficiency import GOAL
from meshwright.observe.event_words import details
from meshwright.observe.goodput import WORDS, Goodput
from meshwright.observe.rank_files import numbers_of, parts_of
from meshwright.observe.tail import Line
from meshwright.observe.view import Rank, View

MOST_POINTS = 2000
MOST_EVENTS = 400
MOST_SKIPPED = 400
LONGEST_TEXT = 4000
"""Characters of one text; reports of hangs are longer, and in the run folder."""


def snapshot(views: Sequence[View]) -> dict[str, Any]:
    """Everything a page shows of some runs."""
    names = _names(views)
    return {"runs": [_run(view, name) for view, name in zip(views, names, strict=True)]}


def to_text(data: object) -> str:
    """JSON that every browser takes: numbers that JSON does not have are null."""
    return json.dumps(clean(data), separators=(",", ":"), allow_nan=False)


def clean(value: object) -> Any:
    """Plain data with finite numbers and texts of bearable length."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + " ..."
    if isinstance(value, Mapping):
        return {str(key): clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    return value if value is None or isinstance(value, bool | int) else str(value)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a page must change to show `new` instead of `old`; None for nothing. Both as `snapshot` gives them."""
    runs: list[dict[str, Any]] = []
    for before, after in zip(old["runs"], new["runs"], strict=True):
        changed = {key: value for key, value in after.items() if key != "curves" and before.get(key) != value}
        grown = {}
        for name, (steps, values) in after["curves"].items():
            had_steps, had_values = before["curves"].get(name, ([], []))
            keep = _common(had_steps, steps, had_values, values)
            if keep < len(steps) or keep < len(had_steps):
                grown[name] = [keep, steps[keep:], values[keep:]]
        gone = [name for name in before["curves"] if name not in after["curves"]]
        runs.append({"changed": changed, "grown": grown, "gone": gone})
    return {"runs": runs} if any(run["grown"] or run["gone"] or _matters(run["changed"]) for run in runs) else None


def _matters(changed: Mapping[str, Any]) -> bool:
    return bool(changed.keys() - {"age_s"})


def _common(had_steps: list[int], steps: list[int], had_values: list[float], values: list[float]) -> int:
    both = min(len(had_steps), len(steps))
    for place in range(both):
        if had_steps[place] != steps[place] or had_values[place] != values[place]:
            return place
    return both


def _names(views: Sequence[View]) -> list[str]:
    """The runs' names, with the folder before it where two are called the same."""
    names = [view.name for view in views]
    return [
        f"{view.path.resolve().parent.name}/{view.name}" if names.count(view.name) > 1 else view.name for view in views
    ]


def _run(view: View, name: str) -> dict[str, Any]:
    curves = {series: view.curves.thinned(series, MOST_POINTS) for series in SERIES}
    return {
        "name": name,
        "state": view.state,
        "reason": view.reason,
        "since": view.since,
        "age_s": view.age_s,
        "updated": view.curves.last_time(),
        "step": view.step,
        "steps": view.steps,
        "world": view.world,
        "strategy": view.strategy_text,
        "degrees": {axis: getattr(view.strategy, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}
        if view.strategy is not None
        else {},
        "device": view.device,
        "chip": next((rank.record.start.get("chip") for rank in view.ranks if rank.record.start.get("chip")), None),
        "step_s": view.step_s,
        "speeds": _speeds(view.curves),
        "efficiency": {"share": view.efficiency.share, "goal": GOAL} if view.efficiency is not None else None,
        "latest": {series: view.curves.last(series) for series in SERIES},
        "curves": {series: [steps, [float(f"{value:.6g}") for value in values]]
                   for series, (steps, values) in curves.items() if steps},
        "ranks": [_rank(rank) for rank in view.ranks],
        "events": [_event(view, place) for place in range(max(0, len(view.events) - MOST_EVENTS), len(view.events))],
        "earlier_events": max(0, len(view.events) - MOST_EVENTS),
        "skipped": _skipped(view),
        "comparison": _comparison(view),
        "pipeline": asdict(view.pipeline) if view.pipeline is not None else None,
        "collectives": view.collectives,
        "goodput": _goodput(view.goodput),
    }  # fmt: skip


def _speeds(curves: Curves) -> dict[str, float | None]:
    """How fast the run is, and over how many steps that is the mean."""
    names = ("tokens_per_s", "tflops_per_device", "mfu")
    return {"steps": curves.averaged("tokens_per_s"), **{name: curves.mean(name) for name in names}}


def _goodput(found: Goodput) -> dict[str, Any] | None:
    if found.wall_s <= 0:
        return None
    rest = [{"name": WORDS.get(name, name), "share": share} for name, share in found.losses()]
    return {"wall_s": found.wall_s, "share": found.share, "rest": rest}


def _event(view: View, place: int) -> dict[str, Any]:
    event = view.events[place]
    step = event.get("step")
    if event["event"] == "gave_up" and step is None:
        step = _step_by(view, place)
    return {"time": event.get("time"), "event": event["event"], "step": step, "words": details(event)}


def _step_by(view: View, place: int) -> int:
    """How far the run was at an event that does not say: the step of the failure before it, else the newest by then."""
    before = next((event for event in reversed(view.events[:place]) if _step_of(event) is not None), None)
    said = 0 if before is None else _step_of(before) or 0
    if before is not None and before["event"] == "failed":
        return said
    time = number(view.events[place].get("time")) or 0.0
    done = [(ended, step) for step, ended in zip(view.curves.steps, view.curves.times, strict=True) if ended <= time]
    return max(said, max(done)[1] if done else 0)


def _step_of(event: Line) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _skipped(view: View) -> dict[str, Any]:
    """Steps that nothing was learned from, and in how many a loss or gradients were no numbers."""
    steps = {step for step, value in view.curves.points("skipped") if value > 0}
    nonfinite = set()
    for event in view.events:
        step = _step_of(event)
        if step is None or event["event"] not in ("nonfinite", "spike"):
            continue
        if event["event"] == "nonfinite":
            nonfinite.add(step)
        # The step in which a run dies has no metrics.
        if event.get("skipped") and step > view.curves.last_step():
            steps.add(step)
    return {"count": len(steps), "steps": sorted(steps)[-MOST_SKIPPED:], "nonfinite": len(nonfinite)}


def _rank(rank: Rank) -> dict[str, Any]:
    record = rank.record
    profiled = record.profiled
    return {
        "rank": rank.rank,
        "at": rank.coordinates,
        "state": rank.state,
        "host": record.start.get("host"),
        "step": (record.last or {}).get("step"),
        "parts": record.split_parts(),
        "mean_of": len(record.mean_steps()),
        "waits_of": record.waits_of,
        "profiled": _profiled(profiled) if profiled is not None else None,
        "efficiency": {**asdict(found), "share": found.share} if (found := rank.efficiency) is not None else None,
        "memory": rank.memory,
        "failures": len(rank.failures),
        "failed": rank.failures[-1].get("cause") if rank.failures else None,
        "straggler": rank.straggler,
    }


def _profiled(line: Line) -> dict[str, Any]:
    """A profiled step: its parts, and beside them what lies within them or behind them."""
    return {
        "step": line.get("step"),
        "parts": parts_of(line),
        "idle": number(line.get("idle")),
        "overlapped": numbers_of(line.get("communication")).get("overlapped"),
    }


def _comparison(view: View) -> dict[str, Any]:
    found = view.comparison
    return {
        "figures": [_pair(one) for one in (found.step_time, found.tokens, found.peak_memory, found.bubble)],
        "memory": [_pair(one) for one in found.memory],
        "fullest": found.fullest,
        "capacity": found.capacity,
        "parts": found.parts,
        "unknown": found.unknown,
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {**asdict(pair), "error": pair.error}
