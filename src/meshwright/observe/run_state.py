"""Whether a run goes on, from what its folder says: the events, who holds the lock, and how long nothing has come."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.lock import is_alive, read_holder
from meshwright.observe.curves import number
from meshwright.observe.tail import Line

State = Literal["waiting", "running", "restarting", "silent", "finished", "stopped", "failed"]
SILENT_S = 120.0
"""Without a sign for so long, a run on another machine is called silent."""
LONGEST_RESTART_S = 600.0
"""A failure after which a run goes on later than this was left to a person; the time between is not the run's."""
TURNS = ("started", "resumed", "failed", "finished", "stopped")
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


def standing(folder: Path, events: Sequence[Line], now: float, last_sign: float | None) -> Standing:
    """How a run stands; `last_sign` is when its files last changed."""
    turn = next((event for event in reversed(events) if event["event"] in TURNS), None)
    start = next((event for event in reversed(events) if event["event"] in ("started", "resumed")), None)
    if turn is None:
        return Standing("waiting", None, "no step yet")
    since, kind = number(turn.get("time")), turn["event"]
    if kind == "finished":
        return Standing("finished", since, "", start)
    alive = _holder_lives(folder / ".lock")
    if kind == "stopped":
        return Standing("stopped", since, str(turn.get("reason") or ""), start)
    if kind == "failed":
        state: State = "failed" if alive is False else "restarting"
        return Standing(state, since, str(turn.get("cause") or ""), start, turn)
    if alive is False:
        return Standing("failed", last_sign, "its process ended without a word", start)
    if alive is None and last_sign is not None and now - last_sign > SILENT_S:
        return Standing("silent", last_sign, "no sign from another machine", start)
    return Standing("running", since, "", start)


def _holder_lives(lock: Path) -> bool | None:
    """Whether the process that holds the folder lives; None where that cannot be seen from this machine."""
    # The lock itself is left alone: even a moment's hold could keep a training out.
    holder = read_holder(lock)
    if holder is None or holder.host != socket.gethostname():
        return None
    return is_alive(holder.pid)


@dataclass(frozen=True)
class TimeLost:
    """Where the time of a run went that was not spent on steps which count."""

    wall_s: float
    """From the first start to the last sign, without the time in which nobody had it run."""
    steps_s: float
    """Spent on steps that count."""
    restarts_s: float = 0.0
    """Between failures and the start that followed."""
    repeated_s: float = 0.0
    """On steps that were undone and computed again."""
    saving_s: float = 0.0
    """In which training waited for checkpoints."""
    evaluation_s: float = 0.0

    @property
    def lost_s(self) -> float:
        """All that was not spent on steps which count."""
        return max(0.0, self.wall_s - self.steps_s)


def time_lost(
    events: Sequence[Line], last_sign: float | None, steps_s: float, step_s: float | None, evaluation_s: float
) -> TimeLost | None:
    """The sum over a run's starts; `step_s` is what one step takes, None where no step is known."""
    wall = restarts = repeated = saving = 0.0
    began: float | None = None
    failed: float | None = None
    for event in events:
        time, kind = number(event.get("time")), event["event"]
        if time is None:
            continue
        if kind in ("started", "resumed"):
            if failed is not None and time - failed <= LONGEST_RESTART_S:
                restarts += max(0.0, time - failed)
            elif began is not None:
                wall += max(0.0, time - began)
            began = time
            failed = None
        elif kind in ("finished", "stopped", "failed") and began is not None:
            wall += max(0.0, time - began)
            began = None
            failed = time if kind == "failed" else None
        saving += number(event.get("stalled_s")) or 0.0
        repeated += (number(event.get("steps_lost")) or 0.0) * (step_s or 0.0)
    if began is not None and last_sign is not None:
        wall += max(0.0, last_sign - began)
    if wall + restarts == 0:
        return None
    return TimeLost(wall + restarts, steps_s, restarts, repeated, saving, evaluation_s)
