"""Where the wall time of a run went: the share that made progress, and what took the rest. Without torch.

Progress is the time of steps that the run still has and has learned from, but for what they waited. Steps that were
lost to a failure or undone by a rollback were in vain, whichever of their two turns one blames: `replayed` is that
time, once. The parts of an account add up to its wall time. A run that a person stopped and took up later was away
meanwhile, which counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from meshwright.observe.rank_files import RankRecord
from meshwright.observe.rank_times import Sums, fact

PARTS = (
    "progress",
    "startup",
    "restart",
    "replayed",
    "skipped",
    "checkpoint",
    "evaluation",
    "bubble",
    "data",
    "communication",
    "between",
    "ending",
    "unknown",
)
"""What wall time goes to. communication is what computing waited for; between is what else happens between two steps;
ending is from the last step of a start to its end."""

WORDS = {
    "startup": "start",
    "restart": "restarts",
    "replayed": "steps done again",
    "skipped": "skipped steps",
    "checkpoint": "checkpoints",
    "bubble": "pipeline bubble",
    "data": "waiting for data",
    "communication": "exposed communication",
    "between": "between steps",
    "unknown": "not known",
}
"""How people call them, where that differs."""

GOES_ON = ("machines come or go", "another strategy is expected to be faster")
"""Reasons of a stop after which the run is started again by itself."""

Line = Mapping[str, Any]

_AFTER_THE_STEP = ("evaluate", "stage", "write", "commit", "retention", "hooks", "end")
"""Phases of a step whose update is made."""


@dataclass(frozen=True)
class Goodput:
    """The account of a run. Seconds."""

    wall_s: float
    parts: dict[str, float]
    """By what it went to, all of PARTS; they add up to the wall time."""
    away_s: float = 0.0
    """How long the run was stopped by a person or a scheduler, beside the wall time."""
    restarts: int = 0
    lost_steps: int = 0
    """Steps that were done in vain."""

    @property
    def share(self) -> float:
        """The share of the wall time that made progress."""
        return self.parts["progress"] / self.wall_s if self.wall_s > 0 else 0.0

    def losses(self) -> list[tuple[str, float]]:
        """What else it went to, as shares of the wall time, the largest first."""
        rest = [(name, seconds / self.wall_s) for name, seconds in self.parts.items() if name != "progress" and seconds]
        return sorted(rest, key=lambda loss: -loss[1])


@dataclass
class _Account:
    """What the walk through a run has added up."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    cursor: float = 0.0
    """Up to when time is accounted for."""
    away_s: float = 0.0
    restarts: int = 0
    lost_steps: int = 0
    stalls_s: float = 0.0
    """What saves are known to have held up."""

    def take(self, until: float, wanted: Iterable[tuple[str, float]], rest: str) -> None:
        """Deal out the time from the cursor until then: to each what it wants while there is any, then to the rest."""
        left = max(0.0, until - self.cursor)
        for part, seconds in wanted:
            given = min(left, max(0.0, seconds))
            self.parts[part] += given
            left -= given
        self.parts[rest] += left
        self.cursor = max(self.cursor, until)

    def name_part(self, part: str, seconds: float) -> None:
        """Say of some of the time that no step claims what it went to."""
        for source in ("unknown", "ending"):
            given = min(self.parts[source], seconds - self.parts[part])
            self.parts[source] -= given
            self.parts[part] += given


def goodput(
    events: Sequence[Line],
    metrics: Sequence[Line],
    ranks: Mapping[int, RankRecord] | None = None,
    began: float | None = None,
    now: float | None = None,
) -> Goodput:
    """The account of a run from its events, its metrics and what its ranks have recorded, as far as there are any.

    `began` is when its first process began, where that is known; `now` is given for a run that still goes on.
    """
    records = list((ranks or {}).values())
    told = _timed(events)
    entries = sorted([*_steps(told, metrics), *told], key=lambda entry: entry[0])
    if not entries:
        return Goodput(0.0, dict.fromkeys(PARTS, 0.0))
    first = entries[0][0]
    account = _Account(cursor=min(first, began) if began is not None else first)
    begin = account.cursor
    _walk(account, entries, records, now)
    account.name_part("checkpoint", _stalls(account, records))
    account.name_part("between", _hooks(records))
    _split_progress(account.parts, metrics, records)
    wall = account.cursor - begin - account.away_s
    return Goodput(wall, account.parts, account.away_s, account.restarts, account.lost_steps)


_Entry = tuple[float, str, Line]
"""When, what, and the facts."""


def _timed(events: Sequence[Line]) -> list[_Entry]:
    return [(fact(event, "time"), str(event.get("event")), event) for event in events if fact(event, "time")]


def _steps(events: Sequence[_Entry], metrics: Sequence[Line]) -> list[_Entry]:
    """Steps with the time at which they ended; where they do not tell it, one after the other since the start."""
    starts: dict[int, float] = {}
    """By step: when a start last went on from there."""
    for when, kind, facts in events:
        if kind in ("started", "resumed"):
            step = int(fact(facts, "step"))
            starts[step] = max(when, starts.get(step, 0.0))
    found: list[_Entry] = []
    time = next((when for when, kind, _ in events if kind in ("started", "resumed")), 0.0)
    for line in metrics:
        if not fact(line, "step") or not fact(line, "step_s"):
            continue
        time = max(time, starts.get(line["step"] - 1, 0.0)) + fact(line, "step_s") + fact(line, "eval_s")
        time = fact(line, "time") or time
        found.append((time, "step", line))
    return found


def _walk(account: _Account, entries: Sequence[_Entry], ranks: Sequence[RankRecord], now: float | None) -> None:
    """Go through a run and deal out its time, but for what is inside of steps."""
    # What time goes to that no step claims: a start, a failure, or nothing that is known.
    claim, running, ended = "startup", False, False
    done_before: int | None = None
    failures = 0  # Since the last start.
    # Once for all restarts: a long run has many steps, and may have had many restarts.
    taken = [fact(facts, "step_s") for _, kind, facts in entries if kind == "step"]
    typical = median(taken) if taken else 0.0
    for time, kind, facts in entries:
        if kind == "step":
            made = "skipped" if fact(facts, "skipped") else "progress"
            wanted = [(made, fact(facts, "step_s")), ("evaluation", fact(facts, "eval_s"))]
            account.take(time, wanted, claim)
            claim, running, ended = "unknown", True, False
        elif kind in ("started", "resumed"):
            if ended:
                account.away_s += max(0.0, time - account.cursor)
                account.cursor = max(account.cursor, time)
                claim = "startup"
            elif running or claim == "restart":
                # Where nobody has told of a failure, the launcher itself was gone.
                account.restarts += 1
                steps, seconds = _lost(int(fact(facts, "step")), (account.cursor, time), done_before, typical, ranks)
                account.lost_steps += steps
                account.take(time, [("replayed", seconds)], "restart")
                claim = "restart"
            running, ended, done_before, failures = True, False, None, 0
        elif kind == "failed":
            step = int(fact(facts, "step"))
            done_before = step if facts.get("phase") in _AFTER_THE_STEP else step - 1
            claim, ended, failures = "restart", False, failures + 1
        elif kind == "gave_up":
            # After one failure nobody has tried to restart.
            end = "ending" if running else "startup"
            account.take(time, [], end if failures == 1 and claim == "restart" else claim)
            claim, ended = "unknown", True
        elif kind == "rollback":
            account.lost_steps += max(0, int(fact(facts, "step") - fact(facts, "to")))
            account.take(time - fact(facts, "seconds"), [], "replayed")
            account.take(time, [], "restart")
            claim = "restart"
        elif kind in ("stopped", "finished"):
            account.take(time, [], "ending" if claim == "unknown" else claim)
            again = str(facts.get("reason")) in GOES_ON
            claim, ended = "restart" if again else "unknown", not again
        elif kind == "checkpoint":
            account.stalls_s += fact(facts, "stalled_s")
    if not ended:
        account.take(max(entries[-1][0], now or 0.0), [], claim)


def _lost(
    resumed: int,
    window: tuple[float, float],
    done_before: int | None,
    typical: float,
    ranks: Sequence[RankRecord],
) -> tuple[int, float]:
    """How many steps after the one resumed from were done in a window of time, and how long that took.

    Where no rank tells, each has taken the `typical` time.
    """
    told = [_in_vain(record, resumed, window) for record in ranks]
    if any(steps for steps, _ in told):
        return max(steps for steps, _ in told), fmean(seconds for _, seconds in told)
    steps = max(0, (done_before or 0) - resumed)
    return steps, steps * typical


def _in_vain(record: RankRecord, resumed: int, window: tuple[float, float]) -> tuple[int, float]:
    """Steps of a rank after the one resumed from that ended in a window, and their seconds."""
    undone = [one for one in record.times.undone if _within(one.until, one.seconds / one.steps, window)]
    if undone:
        return sum(one.steps for one in undone), sum(one.seconds for one in undone)
    # Where no step is done again yet.
    lines = [
        fact(line, "seconds")
        for line in record.steps
        if fact(line, "step") > resumed and _within(fact(line, "time"), fact(line, "seconds"), window)
    ]
    return len(lines), sum(lines)


def _within(time: float, seconds: float, window: tuple[float, float]) -> bool:
    """Whether a step ended in a window; clocks of files may be a moment apart."""
    return window[0] + 0.5 * seconds < time < window[1]


def _stalls(account: _Account, ranks: Sequence[RankRecord]) -> float:
    """Seconds in which saves held up the steps: as ranks have measured it, else as the saves say themselves."""
    return max([account.stalls_s, *(record.times.all.parts.get("checkpoint", 0.0) for record in ranks)])


def _hooks(ranks: Sequence[RankRecord]) -> float:
    """Seconds of what happens between steps, as the ranks have measured it: their mean."""
    return fmean([record.times.all.parts.get("hooks", 0.0) for record in ranks] or [0.0])


def _split_progress(parts: dict[str, float], metrics: Sequence[Line], ranks: Sequence[RankRecord]) -> None:
    """Take out of the time of steps what they waited: the mean over ranks, of unprofiled steps as of profiled ones."""
    lines, profiled = (_together(one.times.all for one in ranks), _together(one.times.profiled for one in ranks))
    progress = parts["progress"]
    shares = {
        "data": _share("data", lines),
        "communication": _share("communication", profiled),
        "bubble": _share("bubble", profiled),
    }
    if not profiled.seconds:
        idle = [min(1.0, fact(line, "pipeline_idle")) for line in metrics if "pipeline_idle" in line]
        passes = _share("forward", lines) + _share("backward", lines) if lines.seconds else 1.0
        shares["bubble"] = passes * fmean(idle) if idle else 0.0
    scale = min(1.0, 1 / max(sum(shares.values()), 1e-9))
    for name, share in shares.items():
        parts[name] += progress * share * scale
        parts["progress"] -= progress * share * scale
    parts["progress"] = max(0.0, parts["progress"])


def _share(part: str, sums: Sums) -> float:
    """The share of a part in the time of steps, without what comes after the update."""
    return min(1.0, sums.parts.get(part, 0.0) / sums.of_steps) if sums.of_steps > 0 else 0.0


def _together(sums: Iterable[Sums]) -> Sums:
    found = Sums()
    for one in sums:
        found.add(one.seconds, one.parts)
    return found
