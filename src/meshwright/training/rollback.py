"""Back to an earlier checkpoint, within the processes: reload it, leave out the samples that went wrong, go on.

What was left out and how often the run went back is in the run folder (`rollbacks.json`) from the moment it happens,
and what was left out in every later checkpoint, so that a run that is started again does the same. Checkpoints of the
steps that were undone are removed: the run will come to those steps again, and otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.format import list_steps, step_name
from meshwright.checkpoint.place import Place
from meshwright.files import write_atomically
from meshwright.training.checkpoints import load_newest
from meshwright.training.step import TrainingError

if TYPE_CHECKING:
    from meshwright.training.loop import TrainingLoop


@dataclass(frozen=True)
class GoBack:
    """A request to go back. Steps count from 1."""

    cause: str
    """nonfinite, spike or replicas."""
    reason: str
    """The same in a sentence."""
    first_bad: int
    """The first step that must be undone."""
    last_bad: int
    skips: bool = True
    """Whether the samples are to blame and left out from now on."""


class Rollbacks:
    """What the run folder remembers of them; every rank keeps a copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.windows: list[list[int]] = held.get("windows", [])
        """The samples that were left out."""
        self.count: int = held.get("count", 0)
        """How often the run went back without getting past the step that went wrong."""
        self.past: int = held.get("past", 0)
        """That step."""
        self.removing: int | None = held.get("removing")
        """While checkpoints are removed: those of later steps than this one go."""

    def write(self) -> None:
        """Put it on the disk; for the first rank."""
        held = {"windows": self.windows, "count": self.count, "past": self.past, "removing": self.removing}
        write_atomically(self.path, json.dumps(held) + "\n")

    def finish(self, checkpoints: Place) -> None:
        """Remove what was undone, also where a crash cut that short; for the first rank."""
        if self.removing is None:
            return
        for step in list_steps(checkpoints):
            if step > self.removing:
                checkpoints.child(step_name(step)).remove()
        self.removing = None
        self.write()


def roll_back(loop: TrainingLoop, request: GoBack) -> None:
    """Take the loop back to the last checkpoint from before the fault; all ranks together."""
    started, begun = time.perf_counter(), loop.step
    rollbacks, elastic, batches = loop.rollbacks, loop.config.elastic, loop.job.batches
    loop.world.pulse.enter("restore")
    for hook in loop.hooks:
        hook.before_rollback(loop)
    if rollbacks.count >= elastic.rollbacks:
        raise TrainingError(_explain_end(loop, request))
    # As places of the sampler, which stay what they are whatever else is left out.
    window: tuple[int, int] | None = None
    if request.skips:
        last = loop.skips.place(batches.position(request.last_bad) - 1)
        window = loop.skips.place(batches.position(request.first_bad - 1)), last + 1
    target = _restore(loop, request)
    if window is not None:
        if elastic.skip_window == "checkpoint":
            window = loop.position, window[1]
        rollbacks.windows.append(list(window))
        loop.skips.add(*window)
    rollbacks.count += 1
    rollbacks.past = max(begun, rollbacks.past)
    rollbacks.removing = target
    if loop.world.is_first:
        loop.job.folder.check_generation()
        rollbacks.write()
        rollbacks.finish(loop.checkpoints)
        facts = {"cause": request.cause, "steps": [target + 1, begun], "skipped": [list(window)] if window else []}
        seconds = round(time.perf_counter() - started, 3)
        loop.job.folder.event("rollback", step=begun, to=target, **facts, count=rollbacks.count, seconds=seconds)
        without = f" without the samples {window[0]} to {window[1] - 1}" if window else ""
        print(
            f"meshwright: {request.reason}: back from step {begun} to the checkpoint of step {target}{without} "
            f"(rollback {rollbacks.count} of at most {elastic.rollbacks} in a row)",
            file=sys.stderr,
            flush=True,
        )
    rollbacks.removing = None
    loop.last_rollback = request, begun, window
    for hook in loop.hooks:
        hook.at_rollback(loop)


def _restore(loop: TrainingLoop, request: GoBack) -> int:
    """Reload the newest checkpoint from before the fault that is whole; gives its step."""
    manifest = load_newest(loop, before=request.first_bad)
    if manifest is None:
        raise TrainingError(_explain_end(loop, request))
    loop.take_up(manifest)
    return manifest.step


def _explain_end(loop: TrainingLoop, request: GoBack) -> str:
    train, elastic = loop.config.train, loop.config.elastic
    if loop.rollbacks.count >= elastic.rollbacks:
        times = f"{loop.rollbacks.count} rollbacks did not get past step {loop.rollbacks.past}"
        tried = times if loop.rollbacks.count else "elastic.rollbacks=0 allows no way back"
    else:
        tried = (
            f"there is no checkpoint from before step {request.first_bad} to go back to "
            f"(checkpoint.every={loop.config.checkpoint.every})"
        )
    advice = (
        f"Lower train.lr={train.lr:g}, lengthen train.warmup_steps={train.warmup_steps}, use train.precision=float32, "
        "leave out more samples with elastic.skip_window=checkpoint, or look at those that "
        f"{loop.job.folder.events} names."
    )
    if request.cause == "replicas":
        advice = f"Look at the named host; {loop.job.folder.events} has every finding."
    return f"{request.reason}: training has diverged, and {tried}. {advice}"
