"""NCCL settings for a machine: what to set and why, what a user has set, what is better left alone, what is wrong.

`nccl_profile(hardware, environment)` is a pure function; `Profile.environment()` is what a launcher adds to a job's
environment. Settings that a user made are never changed. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.cluster.hardware import Hardware
from meshwright.comm.nccl_variables import Given


class Level(StrEnum):
    """How bad a finding is."""

    BREAKS = "breaks"
    """A run over several machines would not start, or would hang."""
    WARNING = "warning"
    """It costs speed, or something set has not the effect that was wanted."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    level: Level
    about: str
    """A variable, a device, a limit."""
    text: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Setting:
    """A value that is better than the default on this hardware."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Kept:
    """A value that a user set, which stays."""

    name: str
    value: str
    origin: str
    ours: str | None = None
    """What would have been set, where that is something."""
    reason: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether it is what we would set; None where we would set nothing."""
        return None if self.ours is None else self.ours == self.value


@dataclass(frozen=True)
class Left:
    """A setting that was looked at and is better left to NCCL."""

    name: str
    reason: str


@dataclass(frozen=True)
class Profile:
    """What came of looking at a machine and its environment."""

    settings: tuple[Setting, ...] = ()
    kept: tuple[Kept, ...] = ()
    left: tuple[Left, ...] = ()
    questions: tuple[Left, ...] = ()
    """What depends on the site, or should be measured first: a name, and what to find out."""
    findings: tuple[Finding, ...] = ()

    def environment(self) -> dict[str, str]:
        """What to add to a job's environment; nothing that a user has set is in it."""
        return {setting.name: setting.value for setting in self.settings}

    @property
    def breaks(self) -> bool:
        """Whether something would keep a run from working."""
        return any(finding.level is Level.BREAKS for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        table = asdict(self)
        for row, kept in zip(table["kept"], self.kept, strict=True):
            row["agrees"] = kept.agrees
        return {"breaks": self.breaks, "environment": self.environment(), **table}


def _harmless(finding: Finding) -> Finding:
    breaks = finding.level is Level.BREAKS and "NCCL" in finding.about
    return replace(finding, level=Level.WARNING) if breaks else finding


Exists = Callable[[Path], bool]


def nccl_profile(
    hardware: Hardware,
    environment: Mapping[str, str] | Mapping[str, Given],
    machines: int = 2,
    exists: Exists = Path.exists,
) -> Profile:
    """The settings for a run on so many machines of this kind; with one there is no network to set up.

    `environment` is a process's, or what `given_settings` made of it and of NCCL's files.
    """
    from meshwright.comm.nccl_checks import check_settings
    from meshwright.comm.nccl_choices import choose
    from meshwright.comm.nccl_system import check_system
    from meshwright.comm.nccl_variables import PREFIXES

    given = {
        name: value if isinstance(value, Given) else Given(value)
        for name, value in environment.items()
        if name.startswith(PREFIXES)
    }
    values = {name: one.value for name, one in given.items()}
    chosen = choose(hardware, values, machines)
    ours = {setting.name: setting for setting in chosen.settings}
    kept = tuple(
        Kept(
            name,
            one.value,
            one.origin,
            ours[name].value if name in ours else None,
            ours[name].reason if name in ours else "",
        )
        for name, one in sorted(given.items())
    )
    findings = (*check_settings(hardware, values, machines, exists), *check_system(hardware, values, machines))
    if not hardware.gpus:
        # NCCL has no part in runs on this machine, whatever is set for it.
        findings = tuple(_harmless(finding) for finding in findings)
    order = list(Level)
    return Profile(
        tuple(setting for setting in chosen.settings if setting.name not in given),
        kept,
        tuple(one for one in chosen.left if one.name not in given),
        tuple(one for one in chosen.questions if one.name not in given),
        tuple(sorted(findings, key=lambda finding: order.index(finding.level))),
    )
