"""Whether the machine is fit to train: readings of its sensors held against limits. Without torch.

A sensor gives readings; a rule says which value of a reading is bad and which is good again. Something is told only
when a reading crosses a limit, and only when it stays there for two readings in a row, so that a value that wavers
around its limit is not told again and again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IN_A_ROW = 2
"""How many readings must agree before something is told."""


@dataclass(frozen=True)
class Reading:
    """A value that a sensor has measured."""

    sensor: str
    """What it was measured on, such as `host` or `gpu 0`."""
    name: str
    value: float
    unit: str = ""
    note: str = ""
    """What a person should know besides, such as which error it was."""

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.sensor} {self.name} {self.value:g}{unit}{f' ({self.note})' if self.note else ''}"


class Sensor(Protocol):
    """Something that can be measured."""

    def read(self) -> Iterable[Reading]:
        """What it is now; empty where it cannot be measured."""


@dataclass(frozen=True)
class Rule:
    """When a reading is bad."""

    name: str
    bad: float
    good: float
    """The value at which it counts as good again; on the other side of a gap, so that it does not waver."""
    setting: str = ""
    serious: bool = False
    """Whether a machine with such a reading should be left."""
    counts: bool = False
    """Whether it is a number of errors: every new one is told."""

    def is_bad(self, value: float) -> bool:
        return value > self.bad if self.bad > self.good else value < self.bad

    def is_good(self, value: float) -> bool:
        return value <= self.good if self.bad > self.good else value >= self.good


@dataclass(frozen=True)
class Change:
    """A reading that has crossed its limit, one way or the other."""

    reading: Reading
    rule: Rule
    bad: bool

    @property
    def text(self) -> str:
        """It in words."""
        setting = f" ({self.rule.setting})" if self.rule.setting else ""
        if not self.bad:
            return f"{self.reading}: within its limit again"
        side = "above" if self.rule.bad > self.rule.good else "below"
        return f"{self.reading}: {side} its limit of {self.rule.bad:g}{setting}"


class HostSensor:
    """Memory, load and the disk of the run folder."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir

    def read(self) -> Iterable[Reading]:
        """What of it can be measured here."""
        yield from _memory()
        with suppress(OSError):
            load, _, _ = os.getloadavg()
            yield Reading("host", "load per core", load / (os.cpu_count() or 1))
        if self._run_dir is not None:
            with suppress(OSError):
                free = shutil.disk_usage(_existing(self._run_dir)).free
                yield Reading("host", "free disk", free / 2**30, "GiB", str(self._run_dir))


def _memory() -> Iterable[Reading]:
    """The share of memory in use: of the container where it has a limit, else of the machine."""
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        kept = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        yield Reading(
            "host", "memory in use", (used - int(kept.get("inactive_file", 0))) / limit, "", "of this container"
        )
        return
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        yield Reading("host", "memory in use", 1 - sizes["MemAvailable"] / sizes["MemTotal"])


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


@dataclass(frozen=True)
class HealthLimits:
    """The limits, from the settings; 0 is none."""

    memory: float = 0.97
    load: float = 0.0
    disk_gib: float = 1.0
    gpu_celsius: float = 90.0

    def rules(self) -> list[Rule]:
        """What they mean."""
        rules = [
            Rule("throttled by heat or power brake", 0.5, 0.0),
            Rule("uncorrected memory errors", 0.5, 0.0, serious=True, counts=True),
            Rule("rows of memory that could not be replaced", 0.5, 0.0, serious=True),
            Rule("hardware errors", 0.5, 0.0, serious=True, counts=True),
            Rule("errors of programs", 0.5, 0.0, counts=True),
        ]
        if self.memory:
            rules.append(Rule("memory in use", self.memory, self.memory - 0.05, "elastic.health_memory"))
        if self.load:
            rules.append(Rule("load per core", self.load, 0.8 * self.load, "elastic.health_load"))
        if self.disk_gib:
            rules.append(Rule("free disk", self.disk_gib, 1.2 * self.disk_gib, "elastic.health_disk_gib"))
        if self.gpu_celsius:
            setting = "elastic.health_gpu_celsius"
            rules.append(Rule("temperature", self.gpu_celsius, self.gpu_celsius - 5, setting, serious=True))
        return rules


class Health:
    """Sensors and their rules; `check` gives what has changed since the last time."""

    def __init__(self, sensors: Sequence[Sensor], rules: Sequence[Rule]) -> None:
        self._sensors = sensors
        self._rules = {rule.name: rule for rule in rules}
        self._told: dict[tuple[str, str], float] = {}
        """The readings that are known to be bad, and how bad they were when that was told."""
        self._row: dict[tuple[str, str], int] = {}

    def check(self) -> list[Change]:
        """Read all sensors; gives the readings that have crossed a limit and stay beyond it."""
        changes = []
        for reading in (reading for sensor in self._sensors for reading in sensor.read()):
            rule = self._rules.get(reading.name)
            if rule is None:
                continue
            key = (reading.sensor, reading.name)
            told = self._told.get(key)
            more = rule.counts and told is not None and reading.value > told
            crossed = more or (rule.is_bad(reading.value) if told is None else rule.is_good(reading.value))
            self._row[key] = self._row.get(key, 0) + 1 if crossed else 0
            if self._row[key] < IN_A_ROW:
                continue
            self._row[key] = 0
            bad = more or told is None
            if bad:
                self._told[key] = reading.value
            else:
                del self._told[key]
            changes.append(Change(reading, rule, bad))
        return changes
