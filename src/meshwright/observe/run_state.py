"""Whether a run goes on, from what its folder says: the events, who holds the lock, and how long nothing has come."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.lock import is_alive, read_holder
from meshwright.observe.curves import number
from meshwright.observe.tail import Line

State = Literal["waiting", "running", "restarting", "silent", "finished", "stopped", "failed"]
SILENT_S = 120.0
"""Without a sign for so long, a run on another machine is called silent."""
TURNS = ("started", "resumed", "failed", "gave_up", "finished", "stopped")
"""Events at which a run's state changes."""


@dataclass(frozen=True)
class Standing:
    """How a run stands."""

    state: State
    since: float | None
    """Unix seconds of the event that made it so."""
    reason: str = ""
    start: Line | None = None
    """The newest event of a start."""
    failure: Line | None = None
    """The newest failure, where no start has followed it."""


def standing(folder: Path, events: Sequence[Line], now: float, last_sign: float | None, step: int) -> Standing:
    """How a run stands; `last_sign` is when its files last changed, `step` the newest one in its metrics."""
    turn = next((event for event in reversed(events) if event["event"] in TURNS), None)
    start = next((event for event in reversed(events) if event["event"] in ("started", "resumed")), None)
    if turn is None and not step:
        return Standing("waiting", None, "no step yet")
    alive = _holder_lives(folder / ".lock")
    silent = last_sign is not None and now - last_sign > SILENT_S
    if turn is None:
        if alive is False or (alive is None and silent):
            return Standing("silent", last_sign, "there is no events.jsonl that says how it ended")
        return Standing("running", None)
    since, kind = number(turn.get("time")), turn["event"]
    if kind == "finished":
        return Standing("finished", since, "", start)
    if kind == "stopped":
        return Standing("stopped", since, str(turn.get("reason") or ""), start)
    if kind == "gave_up":
        failure = next((event for event in reversed(events) if event["event"] == "failed"), turn)
        return Standing("failed", since, str(failure.get("cause") or turn.get("text") or ""), start, failure)
    if kind == "failed":
        state: State = "restarting"
        if alive is not True:
            state = "failed" if alive is False else "silent" if silent else "restarting"
        return Standing(state, since, str(turn.get("cause") or ""), start, turn)
    if alive is False:
        return Standing("failed", last_sign, "its process ended without a word", start)
    if alive is None and silent:
        return Standing("silent", last_sign, "no sign from another machine", start)
    return Standing("running", since, "", start)


def _holder_lives(lock: Path) -> bool | None:
    """Whether the process that holds the folder lives; None where that cannot be seen from this machine."""
    # The lock itself is left alone: even a moment's hold could keep a training out.
    holder = read_holder(lock)
    if holder is None or holder.host != socket.gethostname():
        return None
    with suppress(OSError):
        return is_alive(holder.pid, lock.stat().st_mtime)
    return is_alive(holder.pid)
