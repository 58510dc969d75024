"""Faults on purpose, for tests of what happens then. Nothing here does anything unless MESHWRIGHT_FAULT is set.

`MESHWRIGHT_FAULT="rank=1,step=7,phase=backward,kind=sigkill"` kills rank 1 when it enters the backward pass of step 7.
Several are separated by semicolons. `rank` and `step` may be left out (all of them), `generation` is 0 unless given
(so that what was restarted gets through) and may be `any`; `times` is how often a fault plays in one process, 1 unless
given, and `after` how often a rank comes by unharmed before: `phase=write,after=3` is the fourth piece of a save. Kinds
that only the code at that place can play, such as a loss that is not a number, are given back to it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

VARIABLE = "MESHWRIGHT_FAULT"
NOTES = "MESHWRIGHT_FAULT_NOTES"
"""The variable with a file where faults that play are noted, with their time: for how long it takes to detect them."""


class InjectedError(RuntimeError):
    """The error of kind=raise."""


@dataclass
class Fault:
    """One fault: where it plays, and what it does there."""

    kind: str
    phase: str
    rank: int | None = None
    step: int | None = None
    generation: int | None = 0
    times: int = 1
    after: int = 0

    def plays(self, phase: str, rank: int, step: int, generation: int) -> bool:
        """Whether it is to happen now; asked once each time that a rank comes by."""
        wanted = ((self.rank, rank), (self.step, step), (self.generation, generation))
        if self.phase != phase or self.times <= 0 or not all(want in (None, found) for want, found in wanted):
            return False
        self.after -= 1
        return self.after < 0


def parse_faults(text: str) -> list[Fault]:
    """The faults that a value of the variable describes."""
    return [_parse(part) for part in text.split(";") if part.strip()]


def _parse(text: str) -> Fault:
    given = dict(pair.split("=", 1) for pair in re.split(r"[,\s]+", text.strip()) if "=" in pair)
    try:
        numbers = {key: int(given[key]) for key in ("rank", "step", "times", "after") if key in given}
        generation = given.get("generation", "0")
        return Fault(
            given["kind"], given["phase"], generation=None if generation == "any" else int(generation), **numbers
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{VARIABLE}: '{text}' needs kind=... and phase=..., numbers elsewhere ({error})") from None


def note(rank: int, step: int, fault: Fault) -> None:
    """Note that a fault plays, where that is wanted."""
    if NOTES in os.environ:
        line = {"time": time.time(), "rank": rank, "step": step, "phase": fault.phase, "kind": fault.kind}
        with open(os.environ[NOTES], "a") as file:
            file.write(json.dumps(line) + "\n")


def play(kind: str) -> None:
    """Do what a kind means to a whole process; kinds that it does not know are left to the caller."""
    name, _, amount = kind.partition(":")
    if name in ("sigkill", "sigstop", "sigterm", "sigint", "sigsegv", "sigabrt"):
        os.kill(os.getpid(), signal.Signals[name.upper()])
    elif name == "raise":
        raise InjectedError(f"injected fault {kind}")
    elif name == "exit":
        os._exit(int(amount or 1))
    elif name == "sleep":
        time.sleep(float(amount))
    elif name == "limit":
        # So much more address space, as `prlimit --as` would have it.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(amount), resource.RLIM_INFINITY))
    elif name == "gil":
        # A match that takes for ever and never lets another thread run.
        re.match(r"(a?){40}a{40}", "a" * 40)
    elif name == "all_reduce":
        _spoil_next_all_reduce(amount)


def _spoil_next_all_reduce(how: str) -> None:
    """Let this rank leave out its next sum over ranks, or take part in it with another shape, dtype or operation."""
    import torch
    import torch.distributed as dist

    whole = dist.all_reduce

    def spoiled(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        dist.all_reduce = whole
        if how == "skip":
            return None
        if how == "shape":
            return whole(torch.cat([tensor.flatten()] * 3), *rest, **options)
        if how == "dtype":
            return whole(tensor.to(torch.float16), *rest, **options)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        return dist.all_gather(parts, tensor)

    dist.all_reduce = spoiled
