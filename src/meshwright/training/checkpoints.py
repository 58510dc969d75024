"""When a run saves its state, and what it goes on from."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from meshwright._version import __version__
from meshwright.checkpoint.format import DamageError, Manifest, list_steps, read_manifest, step_name
from meshwright.checkpoint.place import Place
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Outcome, Saver
from meshwright.checkpoint.training_state import parts_of
from meshwright.checkpoint.unsent import unsent_parts
from meshwright.config import CheckpointSection
from meshwright.errors import CheckpointError
from meshwright.training.held_state import NonFiniteState, assert_finite
from meshwright.training.hooks import Hook, Metrics

if TYPE_CHECKING:
    from meshwright.training.loop import TrainingLoop


BESIDE_CPU_TRAINING = 0.03


class SaveCheckpoints(Hook):
    """A checkpoint every checkpoint.every steps, and at the end or when the run is asked to stop."""

    def __init__(self) -> None:
        self.progress = _Progress(self)
        self.saver: Saver | None = None
        self.listeners: list[Callable[[Outcome], None]] = []
        """Who hears what became of every save, on every rank."""
        self._metrics: dict[str, float] = {}
        self._damaged: set[int] = set()
        """Steps whose checkpoints were found damaged right after the save."""

    def at_start(self, trainer: TrainingLoop) -> None:
        self._make_saver(trainer)

    def _make_saver(self, trainer: TrainingLoop) -> Saver:
        if self.saver is None:
            settings, pulse = trainer.config.checkpoint, trainer.world.pulse
            self.saver = Saver(
                trainer.checkpoints,
                trainer.exchange,
                retention_of(settings),
                verify=settings.verify,
                cpu_share=settings.cpu_share or (BESIDE_CPU_TRAINING if trainer.world.device.type == "cpu" else 1.0),
                before_commit=trainer.job.folder.check_generation,
                at=pulse.fault,
            )
            self.saver.durable_step = trainer.resumed_from.step if trainer.resumed_from else -1
        return self.saver

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        # Of all that is measured, the numbers: JSON has no others.
        self._metrics = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        every = trainer.config.checkpoint.every
        saver = self._make_saver(trainer)
        if every and trainer.step % every == 0 and not trainer.finished:
            saver.wait(trainer.config.checkpoint.wait_s)
            busy = trainer.world.sum(torch.tensor([float(saver.busy)], device=trainer.world.device))
            if busy.item():
                text = (
                    f"the checkpoint of step {trainer.step} is left out: the one before is still being written after "
                    f"checkpoint.wait_s={trainer.config.checkpoint.wait_s:g} more seconds; its storage is slow"
                )
                _tell(trainer, "checkpoint_skipped", text)
            else:
                try:
                    self.save(trainer, background=trainer.config.checkpoint.background)
                except NonFiniteState as error:
                    # Nothing that is no number is ever saved; the steps done since the last checkpoint are at risk.
                    _tell(trainer, "checkpoint_failed", f"{error}; training goes on without it")
        self._report(trainer)

    def before_rollback(self, trainer: TrainingLoop) -> None:
        self._make_saver(trainer).wait()
        self._report(trainer)

    def at_rollback(self, trainer: TrainingLoop) -> None:
        saver = self._make_saver(trainer)
        saver.staged_step = saver.durable_step = trainer.step

    def at_end(self, trainer: TrainingLoop) -> None:
        saver = self._make_saver(trainer)
        saver.wait()
        self._report(trainer)
        if not trainer.worked or (saver.durable_step == trainer.step and trainer.step not in self._damaged):
            return
        failures = self._save_last(trainer)
        if trainer.step in self._damaged:
            failures = self._save_last(trainer)
        if failures:
            raise CheckpointError(f"the last state of the run is not saved: {failures[0]}")

    def _save_last(self, trainer: TrainingLoop) -> list[str]:
        """Save while nothing else goes on, in place of what was found damaged; gives what went wrong."""
        if trainer.step in self._damaged and trainer.world.is_first:
            trainer.checkpoints.set_aside(step_name(trainer.step))
        self._damaged.discard(trainer.step)
        self.save(trainer, background=False)
        return self._report(trainer)

    def close(self) -> None:
        if self.saver is not None:
            # After an error the other ranks may be gone: what is under way gets a moment, no more.
            self.saver.wait(timeout_s=30.0)

    def save(self, trainer: TrainingLoop, background: bool) -> None:
        """Save the trainer's state as a checkpoint of its run; every rank writes its share."""
        trainer.world.pulse.enter("stage")
        assert_finite(trainer.model, trainer.optimizer, trainer.world, trainer.step)
        parts = parts_of(trainer.model, trainer.optimizer) | unsent_parts(trainer.one_step.parallel.compressor)
        saver = self._make_saver(trainer)
        saver.save(manifest_of(trainer, self._metrics), parts, background=background)
        before = trainer.resumed_from.step if trainer.resumed_from else -1
        if trainer.world.pulse.generation and saver.durable_step <= before:
            # What failed once may fail again soon: the first checkpoint after it is not held back.
            saver.hurry()
        trainer.world.pulse.enter("hooks")

    def _report(self, trainer: TrainingLoop) -> list[str]:
        """Tell what became of saves; gives the failures."""
        assert self.saver is not None
        failures = []
        for outcome in self.saver.outcomes():
            if outcome.error is not None:
                failures.append(outcome.error)
            if outcome.damage:
                self._damaged.add(outcome.step)
                failures.append(outcome.damage[0].what)
            if trainer.world.is_first:
                _record(trainer, outcome)
            for listener in self.listeners:
                listener(outcome)
        return failures


class _Progress(Hook):
    """Which step was copied and which is safe, among the metrics; comes before those that record them."""

    def __init__(self, saves: SaveCheckpoints) -> None:
        self._saves = saves

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        saver = self._saves.saver
        if saver is not None and saver.staged_step >= 0:
            metrics["staged_step"] = saver.staged_step
        if saver is not None and saver.durable_step >= 0:
            metrics["durable_step"] = saver.durable_step


def retention_of(settings: CheckpointSection) -> Retention:
    """Which checkpoints the settings keep."""
    metric = settings.best.removeprefix("-")
    return Retention(settings.keep, settings.keep_every, settings.keep_best, metric, settings.best.startswith("-"))


def manifest_of(trainer: TrainingLoop, metrics: Mapping[str, float]) -> Manifest:
    """All of a run's state that is no tensor."""
    return Manifest(
        step=trainer.step,
        position=trainer.position,
        strategy=str(trainer.job.strategy),
        ranks=trainer.world.size,
        model=trainer.job.spec,
        run=trainer.run_id,
        settings=trainer.config.identity(),
        seed=trainer.config.run.seed,
        corpora=tuple(corpus.digest for corpus in trainer.job.sampler.corpora),
        metrics=dict(metrics),
        saved_at=time.time(),
        written_by=f"meshwright {__version__}, torch {torch.__version__}",
        state=trainer.state(),
        tensors={},
    )


def _record(trainer: TrainingLoop, outcome: Outcome) -> None:
    folder, step = trainer.job.folder, outcome.step
    if outcome.error is not None:
        then = "" if trainer.finished or trainer.stopping else "; training goes on without it"
        text = f"the checkpoint of step {step} is not saved: {outcome.error}{then}"
        _tell(trainer, "checkpoint_failed", text, step)
        return
    folder.event(
        "checkpoint",
        step=step,
        path=step_name(step),
        seconds=round(outcome.seconds, 3),
        stalled_s=round(outcome.stalled, 3),
        bytes=outcome.nbytes,
        removed=list(outcome.pruned),
    )
    if outcome.damage:
        text = f"the checkpoint of step {step} cannot be trusted: {outcome.damage[0].what}; earlier ones stay"
        _tell(trainer, "checkpoint_damaged", text, step)
    elif outcome.unseen is not None:
        text = f"the checkpoint of step {step} is written and was not read again: {outcome.unseen}; nothing is removed"
        _tell(trainer, "checkpoint_unverified", text, step)


def _tell(trainer: TrainingLoop, kind: str, text: str, step: int | None = None) -> None:
    if trainer.world.is_first:
        trainer.job.folder.event(kind, step=trainer.step if step is None else step, error=text)
        print(f"meshwright: {text}", file=sys.stderr, flush=True)


def load_newest(trainer: TrainingLoop, before: int | None = None) -> Manifest | None:
    """Fill a trainer from the newest checkpoint, of a step before that one, that is whole; None where there is none.

    All ranks try a checkpoint together and go past it together. Damaged ones are announced and, once an
    older one was loaded, set aside; after checkpoint.fallback of them, or when none is left, the run ends rather than
    start from nothing.
    """
    place = trainer.checkpoints
    steps = [step for step in _listed(trainer) if before is None or step < before]
    complaints: list[str] = []
    for step in reversed(steps):
        folder = place.child(step_name(step))
        complaint = _all_hear(trainer, _try(trainer, folder))
        if complaint is None:
            if complaints:
                _announce_fallback(trainer, [number for number in steps if number > step], step, complaints)
            return read_manifest(folder)
        complaints.append(complaint)
        if len(complaints) > trainer.config.checkpoint.fallback:
            break
    if not complaints:
        if before is None:
            _check_new(trainer)
        return None
    listed = "".join(f"\n    {complaint}" for complaint in complaints)
    left = len(steps) - len(complaints)
    hint = f" {left} older ones were not tried: raise checkpoint.fallback to go back further." if left else ""
    raise DamageError(
        f"no checkpoint of {place} that may be used is whole:{listed}\n  The run does not start from nothing by itself."
        f"{hint} Restore a checkpoint from a copy, or start anew with --fresh or another run.dir."
    )


def _check_new(trainer: TrainingLoop) -> None:
    """Raise if this run has saved before, and tell if it has trained: what starts from nothing must be new."""
    complaint = _all_hear(trainer, _saved_before(trainer) if trainer.world.is_first else None)
    if complaint is not None:
        raise DamageError(complaint)
    done = trainer.job.folder.last_recorded_step()
    if done and trainer.world.is_first:
        text = f"no checkpoint was saved yet: the {done} steps that were done start again from the first"
        _tell(trainer, "checkpoint_none", text, 0)


def _saved_before(trainer: TrainingLoop) -> str | None:
    """What is wrong if checkpoints of this run were saved and none is there."""
    saved = [event for event in trainer.job.folder.read_events() if event["event"] == "checkpoint"]
    if not saved:
        return None
    return (
        f"this run has saved step {saved[-1].get('step')}, and {trainer.checkpoints} holds no checkpoint that may be "
        "used.\n  The run does not start from nothing by itself. Set checkpoint.dir to where it was saved, restore a "
        "checkpoint from a copy, or start anew with --fresh or another run.dir."
    )


def _listed(trainer: TrainingLoop) -> list[int]:
    """The steps of the checkpoints, as the first rank sees them: others may see a network disk late."""
    found: list[int] = []
    if trainer.world.is_first:
        trainer.checkpoints.clear_unfinished()
        found = list_steps(trainer.checkpoints)
    trainer.exchange.collect(None)
    heard: list[int] = trainer.exchange.answer([found] * trainer.exchange.size)
    return heard


def _try(trainer: TrainingLoop, folder: Place) -> str | None:
    """Fill this rank from a checkpoint; gives what is damaged about it. Anything else that is wrong is an error."""
    try:
        reader = CheckpointReader(folder)
        trainer.check_same_run(folder, reader.manifest)
        trainer.restore(reader)
    except DamageError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    return None


def _all_hear(trainer: TrainingLoop, complaint: str | None) -> str | None:
    """The first complaint of any rank, on all of them."""
    said = trainer.exchange.collect(complaint)
    first = next((text for text in said if text is not None), None)
    heard: str | None = trainer.exchange.answer([first] * trainer.exchange.size)
    return heard


def _announce_fallback(trainer: TrainingLoop, damaged: list[int], step: int, complaints: list[str]) -> None:
    if not trainer.world.is_first:
        return
    for number in damaged:
        trainer.checkpoints.set_aside(step_name(number))
    text = f"going back to the checkpoint of step {step}: " + "; ".join(complaints)
    trainer.job.folder.event("checkpoint_fallback", step=step, damaged=complaints)
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
