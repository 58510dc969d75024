"""The health of one machine while it trains: its sensors, read from time to time. Without torch."""

from __future__ import annotations

import time

from meshwright.elastic.gpu import find_gpus
from meshwright.elastic.hang_report import Place
from meshwright.elastic.health import Health, HealthLimits, HostSensor, Sensor

PERIOD_S = 10.0
"""Seconds between two readings."""


class MachineWatch:
    """Reads the sensors of this machine and says what has crossed a limit."""

    def __init__(self, limits: HealthLimits, *, drain: bool) -> None:
        """With `drain`, a machine whose hardware is at fault should be left."""
        self._limits = limits
        self._drain = drain
        self._health: Health | None = None
        self._next = 0.0

    def look(self, place: Place) -> list[tuple[str, str]]:
        """What there is to tell, as (health | health_cleared | drain | warning, words); seldom anything."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + PERIOD_S
        found = []
        if self._health is None:
            sensors: list[Sensor] = [HostSensor(place.run_dir)]
            gpus, problem = find_gpus()
            if gpus is not None:
                sensors.append(gpus)
            if problem:
                found.append(("warning", f"{place.host}: {problem}"))
            self._health = Health(sensors, self._limits.rules())
        for change in self._health.check():
            kind = "health" if change.bad else "health_cleared"
            if self._drain and change.bad and change.rule.serious:
                kind = "drain"
            found.append((kind, f"{place.host}: {change.text}"))
        return found
