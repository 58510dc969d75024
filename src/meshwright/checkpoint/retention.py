"""Which checkpoints stay: the last ones, every n-th, the best. Only those that were read again after the save and found
whole count, and the last of these is never removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.checkpoint.checked import Damage, find_damage
from meshwright.checkpoint.format import list_steps, read_manifest, step_name
from meshwright.checkpoint.marks import mark, verified_at
from meshwright.checkpoint.place import Place
from meshwright.errors import CheckpointError


@dataclass(frozen=True)
class Known:
    """A checkpoint, as far as keeping it is concerned."""

    step: int
    verified: bool
    metrics: dict[str, float]


@dataclass(frozen=True)
class Retention:
    """What stays."""

    last: int = 2
    every: int = 0
    """Also those of steps that this divides; 0 for none."""
    best: int = 0
    """Also the best ones by a metric."""
    metric: str = "eval_loss"
    largest: bool = False
    """Whether more of the metric is better."""

    def doomed(self, checkpoints: Sequence[Known]) -> list[int]:
        """The steps whose checkpoints may go, oldest first."""
        sound = sorted((known for known in checkpoints if known.verified), key=lambda known: known.step)
        if not sound:
            return []
        kept = {known.step for known in sound[-max(1, self.last) :]}
        oldest = min(kept)
        if self.every:
            kept |= {known.step for known in sound if known.step % self.every == 0}
        measured = [known for known in sound if self.metric in known.metrics]
        measured.sort(key=lambda known: known.metrics[self.metric], reverse=self.largest)
        kept |= {known.step for known in measured[: self.best]}
        # What is newer may still be in the making; what was never found whole goes with its neighbours.
        return sorted(known.step for known in checkpoints if known.step < oldest and known.step not in kept)


def known_checkpoints(checkpoints: Place) -> list[Known]:
    """What lies in a place of checkpoints."""
    found = []
    for step in list_steps(checkpoints):
        folder = checkpoints.child(step_name(step))
        try:
            metrics = read_manifest(folder).metrics
            found.append(Known(step, verified_at(folder) is not None, metrics))
        except CheckpointError:
            found.append(Known(step, False, {}))
    return found


def doomed_after_reading(checkpoints: Place, retention: Retention) -> tuple[list[int], list[Damage]]:
    """The steps that may go, once all that stays was read again just now; and the damage that was found.

    An old mark is not enough to remove others on: what it speaks of may have been damaged since.
    """
    read: dict[int, bool] = {}
    damage: list[Damage] = []

    def read_again(step: int) -> None:
        folder = checkpoints.child(step_name(step))
        found = find_damage(folder)
        mark(folder, found)
        read[step] = not found
        damage.extend(found)

    for step in list_steps(checkpoints):
        if verified_at(checkpoints.child(step_name(step))) is None:
            read_again(step)
    while True:
        known = [replace(one, verified=read.get(one.step, one.verified)) for one in known_checkpoints(checkpoints)]
        doomed = retention.doomed(known)
        unread = [one.step for one in known if one.step not in read and one.step not in doomed]
        if not doomed or not unread:
            return doomed, damage
        for step in unread:
            read_again(step)


def prune(checkpoints: Place, retention: Retention) -> list[int]:
    """Remove what need not stay; gives the steps that went."""
    doomed = retention.doomed(known_checkpoints(checkpoints))
    remove(checkpoints, doomed)
    return doomed


def remove(checkpoints: Place, steps: Sequence[int]) -> None:
    """Remove the checkpoints of steps."""
    for step in steps:
        checkpoints.child(step_name(step)).remove()
