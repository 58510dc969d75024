"""Events of a run in words, for terminals and pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.observe.curves import number
from meshwright.printable import printable

BESIDE = ("time", "event", "step", "text", "report")
"""Facts that are not listed."""
FACTORS = {"planned": "what its stage should take", "relative": "the others", "own": "its own best"}
"""By what a rank is called slow; what says most comes first."""


def plain(text: object) -> str:
    """Text from a file, without characters that a terminal would obey."""
    return printable(str(text), instead=" ")


def sentence(event: Mapping[str, Any]) -> str:
    """An event in one line. Files may hold anything, so nothing of them reaches a terminal as it is."""
    said = details(event)
    kind = str(event["event"]).replace("_", " ") + (f" at step {event['step']}" if "step" in event else "")
    return plain(kind + (f": {said}" if said else ""))


def details(event: Mapping[str, Any]) -> str:
    """What there is to say of an event beside its kind and its step; maybe several lines, as the file has them."""
    rank = f"rank {event.get('rank', '?')}" + (f" on {event['host']}" if event.get("host") else "")
    match event["event"]:
        case "started" | "resumed":
            return f"{event.get('strategy', '')} on {event.get('ranks', '?')} ranks, {event.get('device', '')}"
        case "checkpoint":
            size = number(event.get("bytes"))
            held = f"{event.get('path', '')}{'' if size is None else f', {size / 2**20:.3g} MiB'}"
            return f"{held} in {_fact(event.get('seconds'))} s; training waited {_fact(event.get('stalled_s'))} s"
        case "failed":
            return f"{rank}: {event.get('cause', '')}" + (f", in {event['phase']}" if event.get("phase") else "")
        case "restarted":
            where = f"generation {event.get('generation', '?')} on {event.get('ranks', '?')} ranks"
            lost = f"{_fact(event.get('steps_lost'))} steps done again"
            return f"{where} after {_fact(event.get('restart_s'))} s; {lost}"
        case "straggler":
            factors = [
                f"{factor:.1f} times {whose}"
                for name, whose in FACTORS.items()
                if (factor := number(event.get(name))) is not None
            ]
            return f"{rank} in {event.get('phase', '?')}: {', '.join(factors)}"
        case "straggler_cleared":
            return f"{rank} in {event.get('phase', '?')}"
    said = next((event[name] for name in ("text", "error") if isinstance(event.get(name), str)), "")
    return said or _facts(event)


def slowness(event: Mapping[str, Any]) -> float | None:
    """How many times as long a rank takes as it should, by what was said of it."""
    return next((factor for name in FACTORS if (factor := number(event.get(name)))), None)


def _facts(event: Mapping[str, Any]) -> str:
    told = [name for name in event if name not in BESIDE and event[name] not in (None, "")]
    return ", ".join(f"{str(name).replace('_', ' ')} {_fact(event[name])}" for name in told)


def _fact(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
