"""A run folder as plain data, read again and again at the price of what was added: what all displays of a run show.

    run = RunView("runs/demo")
    view = run.refresh()        # a View: state, curves, ranks, events, prediction beside measurement

Works on a run that is going on, over or broken, with whatever files there are. No torch.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.comm.compression import NONE
from meshwright.errors import ConfigError
from meshwright.lock import is_alive
from meshwright.observe.account import Account
from meshwright.observe.comparison import Comparison, compare
from meshwright.observe.curves import Curves, number
from meshwright.observe.efficiency import Efficiency, efficiency
from meshwright.observe.event_words import slowness
from meshwright.observe.goodput import Goodput
from meshwright.observe.pipeline_view import PipelineView, pipeline_view
from meshwright.observe.rank_files import RankFiles, RankRecord, numbers_of
from meshwright.observe.run_state import Standing, State, standing
from meshwright.observe.tail import Line, Tail, read_json
from meshwright.strategy import Strategy

RankState = Literal["alive", "lost", "waiting", "ended", "unknown"]
AXES = ("pp", "dp", "cp", "tp", "ep")


@dataclass(frozen=True)
class Rank:
    """One rank: its place in the mesh, how it is, and what it has recorded."""

    rank: int
    coordinates: dict[str, int]
    state: RankState
    record: RankRecord
    failures: list[Line] = field(default_factory=list)
    """Events of failures that began with this rank."""
    straggler: Line | None = None
    """The newest event since the run's last start that calls it slow."""

    @property
    def efficiency(self) -> Efficiency | None:
        """How much of its computing and exposed communication was computing."""
        return efficiency([self.record])

    @property
    def memory(self) -> dict[str, float]:
        """Bytes by name (rss, allocated, reserved, peak) at its newest step."""
        return numbers_of((self.record.last or {}).get("memory"))


@dataclass(frozen=True)
class View:
    """A run as it is now."""

    name: str
    path: Path
    state: State
    reason: str
    """Why it is in that state, where that needs a word."""
    since: float | None
    age_s: float | None
    """Seconds since the newest step ended, or since anything was written before the first."""
    step: int
    steps: int | None
    """How many the run is to have."""
    world: int
    strategy_text: str
    strategy: Strategy | None
    """None where the text cannot be taken for that many ranks."""
    device: str
    curves: Curves
    step_s: float | None
    """What a step takes: the median of the last 50."""
    ranks: list[Rank]
    events: list[Line]
    comparison: Comparison
    pipeline: PipelineView | None
    goodput: Goodput
    """Where its time went."""

    @property
    def efficiency(self) -> Efficiency | None:
        """How much of computing and exposed communication was computing, over all ranks."""
        return efficiency(rank.record for rank in self.ranks)

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was left out: overflows, NaN, spikes."""
        return [step for step, value in self.curves.points("skipped") if value]

    @property
    def collectives(self) -> Line | None:
        """The newest collectives of the first rank that has recorded some."""
        return next((rank.record.collectives for rank in self.ranks if rank.record.collectives is not None), None)


class RunView:
    """Follows one run folder."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._metrics, self._events = Tail(self.path / "metrics.jsonl"), Tail(self.path / "events.jsonl")
        self._files = RankFiles(self.path / "ranks")
        self._curves = Curves()
        self._account = Account(self.path)
        self._read_events: list[Line] = []

    def refresh(self) -> View:
        """Read what was added since the last call, and give the whole."""
        self._take()
        now, events, curves = self._clock(), self._read_events, self._curves
        sign = self._last_sign()
        stands = standing(self.path, events, now, sign, curves.last_step())
        config, plan = self._config(), read_json(self.path / "plan.json")
        world = _world(stands, plan, self._files)
        said = (record.start.get("strategy") for record in self._files.records.values())
        text = str(
            (stands.start or {}).get("strategy")
            or next(filter(None, said), None)
            or plan.get("strategy")
            or config.get("strategy")
            or ""
        )
        strategy = _parse(text, world)
        last = curves.last_time() or sign
        ranks = self._ranks(stands, world, strategy)
        records = {rank.rank: rank.record for rank in ranks}
        goes_on = stands.state in ("running", "restarting")
        # What is expected of a strategy that compresses is expected of its compressed steps.
        compresses = strategy is not None and strategy.compress != NONE and strategy.dp > 1
        counted = curves.compressed() if compresses else curves
        comparison = compare(plan, counted, _step_s(counted), [(one.coordinates, one.record) for one in ranks])
        return View(
            name=self.path.resolve().name,
            path=self.path,
            state=stands.state,
            reason=stands.reason,
            since=stands.since,
            age_s=None if last is None else max(0.0, now - last),
            step=curves.last_step(),
            steps=config.get("steps"),
            world=world,
            strategy_text=text,
            strategy=strategy,
            device=str((stands.start or {}).get("device") or ""),
            curves=curves,
            step_s=_step_s(curves),
            ranks=ranks,
            events=list(events),
            comparison=comparison,
            pipeline=self._pipeline(strategy, plan, ranks),
            goodput=self._account.now(events, curves, records, now if goes_on else None),
        )

    def _take(self) -> None:
        metrics, events = self._metrics.read(), self._events.read()
        if metrics.anew:
            self._curves = Curves()
        for line in metrics.lines:
            self._curves.add(line)
        if events.anew:
            self._read_events = []
        self._read_events += [line for line in events.lines if isinstance(line.get("event"), str)]
        self._files.refresh()

    def _last_sign(self) -> float | None:
        """When the run's records last changed."""
        times = []
        for name in ("metrics.jsonl", "events.jsonl"):
            with suppress(OSError):
                times.append(os.stat(self.path / name).st_mtime)
        return max(times, default=None)

    def _config(self) -> Line:
        """What the configuration says of length and strategy."""
        try:
            held = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        train, parallel = held.get("train"), held.get("parallel")
        steps = train.get("steps") if isinstance(train, dict) else None
        return {
            "steps": steps if isinstance(steps, int) else None,
            "strategy": parallel.get("strategy") if isinstance(parallel, dict) else None,
        }

    def _ranks(self, stands: Standing, world: int, strategy: Strategy | None) -> list[Rank]:
        begun = number((stands.start or {}).get("time"))
        turned = max((number(one.get("time")) or 0.0 for one in self._read_events if _ends(one)), default=0.0)
        failures, slow = _by_rank(self._read_events, begun)
        records = [self._files.records.get(rank) or RankRecord(rank) for rank in range(world)]
        found = []
        for rank, (record, state) in enumerate(zip(records, _states(stands, records, turned), strict=True)):
            found.append(
                Rank(
                    rank,
                    _coordinates(record, strategy),
                    state,
                    record,
                    failures.get(rank, []),
                    _slowest(slow.get(rank, {})),
                )
            )
        return found

    def _pipeline(self, strategy: Strategy | None, plan: Line, ranks: Sequence[Rank]) -> PipelineView | None:
        if strategy is None or strategy.pp == 1:
            return None
        column = [one for one in ranks if not any(one.coordinates.get(axis) for axis in ("dp", "cp", "tp"))]
        spans = self._files.spans([one.rank for one in column])
        by_stage = {one.coordinates.get("pp", 0): spans[one.rank] for one in column if one.rank in spans}
        return pipeline_view(strategy, plan, by_stage)


def _step_s(curves: Curves) -> float | None:
    recent = curves.recent("step_s")
    return statistics.median(recent) if recent else None


def _ends(event: Line) -> bool:
    return event["event"] in ("failed", "gave_up", "stopped", "finished")


def _by_rank(events: Sequence[Line], begun: float | None) -> tuple[dict[int, list[Line]], dict[int, dict[str, Line]]]:
    """Failures of each rank, and in which phases it was called slow since the last start."""
    failures: dict[int, list[Line]] = {}
    slow: dict[int, dict[str, Line]] = {}
    for event in events:
        rank = event.get("rank")
        if not isinstance(rank, int):
            continue
        if event["event"] == "failed":
            failures.setdefault(rank, []).append(event)
        elif event["event"] == "straggler" and (begun is None or (number(event.get("time")) or 0.0) >= begun):
            slow.setdefault(rank, {})[str(event.get("phase"))] = event
        elif event["event"] == "straggler_cleared":
            slow.get(rank, {}).pop(str(event.get("phase")), None)
    return failures, slow


def _slowest(slow: Mapping[str, Line]) -> Line | None:
    """What was said of a slow rank: of the phase in which it is slowest, naming all of them."""
    ordered = sorted(slow.values(), key=lambda event: -(slowness(event) or 0.0))
    return ordered[0] | {"phase": " and ".join(str(event.get("phase")) for event in ordered)} if ordered else None


def _states(stands: Standing, records: Sequence[RankRecord], turned: float) -> list[RankState]:
    """How the ranks are. When one is lost the others are ended: who it was is told soon, by whoever is left."""
    found = [_state(stands, record, turned) for record in records]
    if stands.failure is None and stands.state != "failed" and found.count("lost") > 1:
        return ["unknown" if state == "lost" else state for state in found]
    return found


def _state(stands: Standing, record: RankRecord, turned: float) -> RankState:
    """How a rank is; `turned` is when a generation of ranks last ended."""
    if stands.failure is not None:
        if stands.failure.get("rank") == record.rank:
            return "lost"
        return "ended" if stands.state == "failed" else "waiting"
    if stands.state in ("finished", "stopped"):
        return "ended"
    pid, here = record.start.get("pid"), record.start.get("host") == socket.gethostname()
    current = (number(record.start.get("time")) or 0.0) >= turned
    if here and current and isinstance(pid, int) and not is_alive(pid, number(record.start.get("time"))):
        return "lost"
    if stands.state == "failed":
        return "ended"
    return "alive" if stands.state == "running" else "unknown"


def _world(stands: Standing, plan: Line, files: RankFiles) -> int:
    """How many ranks the run has now."""
    question = plan.get("question")
    said = (
        (stands.start or {}).get("ranks"),
        *(record.start.get("world") for record in files.records.values()),
        question.get("ranks") if isinstance(question, dict) else None,
    )
    return next((one for one in said if isinstance(one, int) and 0 < one <= 1 << 20), 0)


def _parse(text: str, world: int) -> Strategy | None:
    try:
        # Nothing is a strategy, too: plain copies, which nobody has said of this run.
        return Strategy.parse(text, world) if world and text else None
    except (ConfigError, ValueError):
        return None


def _coordinates(record: RankRecord, strategy: Strategy | None) -> dict[str, int]:
    """A rank's place: as it says, or as the strategy deals ranks out."""
    said = {axis: int(place) for axis, place in numbers_of(record.start.get("coordinates")).items() if axis in AXES}
    if said or strategy is None:
        return said
    rest, tp = divmod(record.rank, strategy.tp)
    rest, cp = divmod(rest, strategy.cp)
    pp, dp = divmod(rest, strategy.dp)
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": dp % strategy.ep}
