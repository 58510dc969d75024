"""Events of a run in words, a line each. Files may hold anything, so nothing of them reaches a terminal as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.observe.curves import number

BESIDE = ("time", "event", "step", "text", "report")
"""Facts that are not listed."""


def plain(text: object) -> str:
    """Text from a file, without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def sentence(event: Mapping[str, Any]) -> str:
    """An event in one line."""
    kind, step = plain(event["event"]), plain(event.get("step", "?"))
    rank = f"rank {plain(event.get('rank', '?'))}" + (f" on {plain(event['host'])}" if event.get("host") else "")
    if kind in ("started", "resumed"):
        return f"{kind} at step {step}: {_facts(event, ('strategy', 'ranks', 'device'))}"
    if kind == "checkpoint":
        return f"step {step} saved in {_fact(event.get('seconds'))} s; steps waited {_fact(event.get('stalled_s'))} s"
    if kind == "failed":
        return f"{rank} failed: {plain(event.get('cause'))}, in {plain(event.get('phase'))} of step {step}"
    if kind == "restarted":
        lost = f"{_fact(event.get('steps_lost'))} steps done again"
        return f"restarted from step {step} in {_fact(event.get('restart_s'))} s; {lost}"
    if kind == "straggler":
        factors = [
            f"{factor:.1f} times {whose}"
            for name, whose in (("relative", "the others"), ("own", "its own best"))
            if (factor := number(event.get(name))) is not None
        ]
        return f"{rank} is slow in {plain(event.get('phase'))} since step {step}: {', '.join(factors)}"
    if kind == "straggler_cleared":
        return f"{rank} is no longer slow in {plain(event.get('phase'))} at step {step}"
    said = next((plain(event[name]) for name in ("text", "error") if isinstance(event.get(name), str)), "")
    said = said or _facts(event, [name for name in event if name not in BESIDE])
    return kind.replace("_", " ") + (f" at step {step}" if "step" in event else "") + (f": {said}" if said else "")


def _facts(event: Mapping[str, Any], names: Any) -> str:
    told = [name for name in names if isinstance(event.get(name), str | int | float) and event[name] != ""]
    return ", ".join(f"{plain(name)} {_fact(event[name])}" for name in told)


def _fact(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else plain(value)
