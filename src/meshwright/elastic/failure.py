"""What went wrong with a rank, and which of several ranks' troubles came first."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ExitCode

LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "DistBackendError",
    "DistNetworkError",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed",
)
"""Signs of an error that only says that another rank is gone."""


class RankError(RuntimeError):
    """A rank failed; the message has its number and its own traceback."""

    exit_code: int = ExitCode.FAILED


@dataclass(frozen=True)
class Failure:
    """Why a generation of ranks ended before its time."""

    rank: int
    """The guilty rank; -1 when no rank is to blame."""
    world: int
    host: str
    cause: str
    """In a few words."""
    text: str
    """All that is known, for a person."""
    generation: int = 0
    step: int = 0
    phase: str = "start"
    code: int | None = None
    """Exit code of a mistake that starting again would not mend."""
    consequence: bool = False
    """Whether it only follows from trouble elsewhere."""
    check: bool = False
    """Whether ranks seem to disagree in a collective: checked, they say which of them called what."""
    remedied: bool = False
    """Whether the rank has changed what made it fail, so that the next start is another one."""
    time: float = 0.0
    detect_s: float = 0.0
    """Seconds from the last sign of life of the guilty rank to the moment when its trouble was noticed."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @property
    def title(self) -> str:
        """One line: who, where, what, when."""
        who = f"rank {self.rank} of {self.world} on {self.host}" if self.rank >= 0 else self.host
        return f"{who}: {self.cause}, in step {self.step} ({self.phase})"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The trouble that the others follow from: a rank's own error, else a rank that was killed, else the earliest."""
    # A rank that was killed cannot speak, and the lost connections that the others report are its consequence.
    own = [failure for failure in failures if not failure.consequence]
    return min(own or failures, key=lambda failure: failure.time)


def describe_error(report: Mapping[str, Any], rank: int, world: int) -> str:
    """What a person reads of a rank that told its error."""
    return str(report["text"]) if report["code"] is not None else f"rank {rank} of {world} failed:\n{report['text']}"


def describe_death(rank: int, world: int, number: int, out_of_memory: bool) -> str:
    """What a person reads of a rank that a signal ended."""
    name = signal.Signals(number).name
    hint = ""
    if number == signal.SIGKILL:
        hint = "; the machine may have run out of memory"
        if out_of_memory:
            hint = (
                "; the kernel's out-of-memory killer was at work in that time: lower train.micro_batch, "
                "or split the model further with parallel.strategy"
            )
    return f"rank {rank} of {world} was ended by {name}{hint}"


def kills_for_memory() -> int:
    """How often the kernel has killed a process for want of memory, on this machine or in this container."""
    count = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with suppress(OSError, ValueError):
            words = path.read_text().split()
            count += int(words[words.index("oom_kill") + 1])
    return count
