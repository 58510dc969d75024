"""ledger.jsonl: the samples that every step was fed, and a proof from it that none was lost or repeated.

A line a step, written by the first rank from what all ranks say they were fed:

    {"step": 7, "fed": [[[48, 50], [52, 54]], [[50, 52], [54, 56]]]}

Here the first data rank was fed the samples 48, 49 and then 52, 53; ends are not included. `skipped` says that the step
was not learned from, and why; `bad` which samples could not be read and did not count. A line with `rollback` says that
steps were undone (their lines are gone) and which samples are left out since.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from meshwright.data.skips import SkippedWindows, runs
from meshwright.errors import CheckpointError, DataError
from meshwright.files import write_atomically
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

Ranges = list[tuple[int, int]]
NOTHING = -1
"""Where a rank has no sample."""


class Ledger(Hook):
    """Writes the ledger, a line a step, on the disk's side of Python's buffer when the step is done."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self.data_ranks: list[int] = []

    def at_start(self, trainer: TrainingLoop) -> None:
        self.data_ranks = trainer.world.gather(torch.tensor([trainer.one_step.data_rank])).flatten().tolist()
        self._open(trainer)
        if self.file is not None:
            # A crash may have come between a rollback and its line.
            known = [window for kept in _rollbacks(trainer.job.folder.ledger) for window in kept["skipped"]]
            if missing := [window for window in trainer.rollbacks.windows if window not in known]:
                self._write(trainer, {"rollback": {"skipped": missing}})

    def _open(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first:
            path = trainer.job.folder.ledger
            forget_after(path, trainer.step)
            self.file = path.open("a")

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        samples = trainer.batch["samples"]
        ignored = trainer.batch.get("ignored", torch.zeros_like(samples))
        said = torch.stack((samples, ignored))
        if missing := self._most_samples(trainer) - samples.shape[1]:
            # Ranks with smaller shares of the batch say as much as the others.
            said = torch.nn.functional.pad(said, (0, missing), value=NOTHING)
        everyone = trainer.world.gather(said).numpy()
        if not trainer.world.is_first:
            return
        fed: dict[int, np.ndarray] = {}
        for rank, (data_rank, own) in enumerate(zip(self.data_ranks, everyone, strict=True)):
            if not np.array_equal(own, fed.setdefault(data_rank, own)):
                raise DataError(
                    f"step {trainer.step}: rank {rank} was fed other samples than the ranks that share its part "
                    f"of the batch (data rank {data_rank}); see {trainer.job.folder.ledger}"
                )
        line: dict[str, Any] = {
            "step": trainer.step,
            "fed": [[window for row in fed[index][0] for window in runs(row[row != NOTHING])] for index in sorted(fed)],
        }
        if metrics.get("skipped"):
            line["skipped"] = next((name for name in ("nonfinite", "spike") if metrics.get(name)), "overflow")
        if bad := [int(number) for own in fed.values() for number in own[0][own[1] > 0]]:
            line["bad"] = bad
        self._write(trainer, line)

    def _most_samples(self, trainer: TrainingLoop) -> int:
        """The samples of a micro-step on the rank that has the largest share of it."""
        strategy, own = trainer.job.strategy, trainer.batch["samples"].shape[1]
        return own // strategy.data_shares[trainer.one_step.data_rank] * max(strategy.data_shares)

    def at_rollback(self, trainer: TrainingLoop) -> None:
        if self.file is None or trainer.last_rollback is None:
            return
        self.close()
        self._open(trainer)
        request, begun, window = trainer.last_rollback
        facts = {"cause": request.cause, "steps": [trainer.step + 1, begun], "skipped": [window] if window else []}
        self._write(trainer, {"rollback": facts})

    def _write(self, trainer: TrainingLoop, line: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            raise CheckpointError(
                f"step {trainer.step} cannot be recorded in {trainer.job.folder.ledger}: {error.strerror}; "
                "make room and start the same command again: it goes on from the latest checkpoint"
            ) from error

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be computed again, and a last line that a crash cut short."""
    if not path.exists():
        return
    text = path.read_text()
    kept = [line for line in text.splitlines() if (entry := _read(line)) is not None and entry.get("step", 0) <= step]
    if (new := "".join(line + "\n" for line in kept)) != text:
        write_atomically(path, new)


def _read(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _rollbacks(path: Path) -> list[dict[str, Any]]:
    """What the ledger says of rollbacks."""
    entries = map(_read, path.read_text().splitlines())
    return [entry["rollback"] for entry in entries if entry is not None and "rollback" in entry]


@dataclass
class Account:
    """What a ledger proves. Ranges are [start, end)."""

    steps: dict[int, Ranges] = field(default_factory=dict)
    """What each step was fed by all ranks together, in order of the samples."""
    fed: int = 0
    """How many samples all steps were fed."""
    bad: list[int] = field(default_factory=list)
    """Samples that could not be read and did not count."""
    skipped_steps: dict[int, str] = field(default_factory=dict)
    """Steps that were not learned from, and why."""
    skipped_windows: Ranges = field(default_factory=list)
    """Samples that were left out on purpose, after a rollback."""
    lost: Ranges = field(default_factory=list)
    """Samples that no step was fed although later ones were."""
    repeated: Ranges = field(default_factory=list)
    """Samples that were fed more than once."""
    problems: list[str] = field(default_factory=list)
    """Everything that speaks against the run, in words."""

    @property
    def exact(self) -> bool:
        """Whether every sample was fed exactly once, in the order of the steps, but for windows left out on purpose."""
        return not self.problems


def account(path: str | Path) -> Account:
    """Go through the ledger of a run (its file or the run folder)."""
    path = Path(path)
    path = path / "ledger.jsonl" if path.is_dir() else path
    found, windows, previous, end = Account(), SkippedWindows(), 0, 0
    all_fed: Ranges = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        entry = _read(text)
        if entry is None:
            found.problems.append(f"line {number} is cut short or no JSON")
            continue
        if "rollback" in entry:
            for start, stop in entry["rollback"]["skipped"]:
                windows.add(start, stop)
            continue
        step = entry["step"]
        ranges = sorted((start, stop) for rank in entry["fed"] for start, stop in rank)
        if previous and step != previous + 1:
            found.problems.append(f"line {number} is of step {step}, after step {previous}")
        if ranges and ranges[0][0] < end:
            found.problems.append(f"step {step} was fed sample {ranges[0][0]}, from before step {previous}'s last one")
        previous, end = step, max([end, *(stop for _, stop in ranges)])
        found.steps[step] = _merged(ranges)
        found.bad += entry.get("bad", [])
        if "skipped" in entry:
            found.skipped_steps[step] = entry["skipped"]
        all_fed += ranges
    found.skipped_windows = windows.windows
    found.fed = sum(stop - start for start, stop in all_fed)
    _compare(found, sorted(all_fed))
    return found


def _compare(found: Account, fed: Ranges) -> None:
    """What is missing between the first and the last sample, and what is there twice."""
    if not fed:
        found.problems.append("the ledger is empty")
        return
    # A ledger that was switched on later knows nothing of the samples before.
    reached = 0 if 1 in found.steps else fed[0][0]
    for start, stop in sorted([*fed, *found.skipped_windows]):
        if start > reached:
            found.lost.append((reached, start))
        elif start < reached:
            found.repeated.append((start, min(stop, reached)))
        reached = max(reached, stop)
    # A window at the end may reach beyond what was fed so far; that is no gap.
    found.lost = [window for window in found.lost if window[0] < fed[-1][1]]
    found.lost, found.repeated = _merged(found.lost), _merged(found.repeated)
    found.problems += [f"samples {start} to {stop - 1} were never fed" for start, stop in found.lost]
    found.problems += [f"samples {start} to {stop - 1} were fed twice" for start, stop in found.repeated]


def _merged(ranges: Ranges) -> Ranges:
    """Ranges in order, neighbours as one; those that overlap stay apart, since that is a finding."""
    merged: Ranges = []
    for start, stop in sorted(ranges):
        if merged and start == merged[-1][1]:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _lines(found: Account) -> Iterator[str]:
    yield f"{len(found.steps)} steps, {found.fed} samples fed"
    yield from (f"step {step} was not learned from: {why}" for step, why in found.skipped_steps.items())
    yield from (f"samples {start} to {stop - 1} were left out on purpose" for start, stop in found.skipped_windows)
    if found.bad:
        yield f"samples that could not be read: {found.bad}"
    yield from found.problems
    yield "exact: no sample lost, none repeated" if found.exact else "NOT exact"


if __name__ == "__main__":
    for ledger in sys.argv[1:]:
        print(f"{ledger}:", *_lines(account(ledger)), sep="\n  ")
    sys.exit(not all(account(ledger).exact for ledger in sys.argv[1:]))
