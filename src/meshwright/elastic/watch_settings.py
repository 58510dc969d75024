"""What of a run's settings the watchdog follows, and the command that starts it with them. Without torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from meshwright.elastic.health import HealthLimits
from meshwright.elastic.limits import Limits

if TYPE_CHECKING:
    # It brings pydantic, for which a watchdog would have to wait.
    from meshwright.config import ElasticSection


@dataclass(frozen=True)
class WatchSettings:
    """What of a run's settings the watchdog follows; `elastic` has the same names."""

    first_timeout_s: float = 480.0
    hang_factor: float = 5.0
    hang_floor_s: float = 60.0
    health: str = "warn"
    health_memory: float = 0.97
    health_load: float = 0.0
    health_disk_gib: float = 1.0
    health_gpu_celsius: float = 90.0

    @property
    def limits(self) -> Limits:
        """For ranks."""
        return Limits(self.first_timeout_s, self.hang_factor, self.hang_floor_s)

    @property
    def health_limits(self) -> HealthLimits:
        """For machines."""
        return HealthLimits(self.health_memory, self.health_load, self.health_disk_gib, self.health_gpu_celsius)


def watchdog_command(settings: WatchSettings | ElasticSection) -> list[str]:
    """The command with which this process starts a watchdog, but for the folder; its input must be a pipe."""
    chosen = {one.name: getattr(settings, one.name) for one in fields(WatchSettings)}
    command = [sys.executable, "-m", "meshwright.elastic.watchdog"]
    return [*command, "--parent", str(os.getpid()), "--settings", json.dumps(chosen)]
