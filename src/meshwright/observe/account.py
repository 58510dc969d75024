"""The account of a run's time from what its folder holds, kept up to date at little price. Without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.observe.curves import Curves, number
from meshwright.observe.goodput import Goodput, goodput
from meshwright.observe.rank_files import RankRecord
from meshwright.observe.tail import Line, read_json

MOST_SHARE = 0.05
"""The share of time that accounting for a long run may take."""


class Account:
    """Where the time of one run went so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: Goodput | None = None
        self._counted_at, self._counting_s = float("-inf"), 0.0
        self._over = False

    def now(
        self, events: Sequence[Line], curves: Curves, ranks: Mapping[int, RankRecord], now: float | None
    ) -> Goodput:
        """The account; of a long run that goes on it may be that of a moment ago. `now` is None once a run is over."""
        began = time.monotonic()
        is_due = began - self._counted_at >= self._counting_s / MOST_SHARE
        if self._found is None or is_due or self._over != (now is None):
            self._found, self._over = self._count(events, curves, ranks, now), now is None
            self._counted_at, self._counting_s = began, time.monotonic() - began
        return self._found

    def _count(
        self, events: Sequence[Line], curves: Curves, ranks: Mapping[int, RankRecord], now: float | None
    ) -> Goodput:
        columns = {name: dict(curves.points(name)) for name in ("step_s", "eval_s", "pipeline_idle", "skipped")}
        metrics = [
            {"step": step, "time": when} | {name: column[step] for name, column in columns.items() if step in column}
            for step, when in zip(curves.steps, curves.times, strict=True)
        ]
        return goodput(events, metrics, ranks, self._began(), now)

    def _began(self) -> float | None:
        """When the first process took the folder, which wrote the file then."""
        path = self._path / "run.json"
        said = number(read_json(path).get("began"))
        if said is not None:
            return said
        with suppress(OSError):
            # Earlier runs do not say: a copy of their folder has another time.
            return path.stat().st_mtime
        return None
