"""What the operating system says of a process: whether it runs, is stopped, is gone. Without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

GONE = "gone"
STOPPED = "T"
TRACED = "t"
ZOMBIE = "Z"

WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "in a call of the kernel that cannot be interrupted, usually a disk or a device",
    STOPPED: "stopped by a signal (SIGSTOP or Ctrl-Z); kill -CONT lets it go on",
    TRACED: "held by a debugger",
    ZOMBIE: "ended, and not yet taken note of by its parent",
    GONE: "gone",
    "?": "not known on this system",
}

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessState:
    """A process at one moment."""

    state: str
    """The letter that the kernel has for it, or GONE."""
    started: int = 0
    """When it was started; with the number of the process this is one process and no later one."""
    cpu_s: float = 0.0
    """Processor time it has used."""

    @property
    def ended(self) -> bool:
        """Whether it will never run again."""
        return self.state in (GONE, ZOMBIE, "X")


def process_state(pid: int) -> ProcessState:
    """The state of a process; outside Linux only whether it is there."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ProcessState(GONE)
        except PermissionError:
            pass
        return ProcessState("?")
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessState(GONE)
    # The name stands in parentheses and may hold anything.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessState(fields[0], int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS)


def kernel_wait(pid: int) -> str:
    """The function of the kernel that a process waits in; empty where that is not told."""
    try:
        found = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if found == "0" else found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
