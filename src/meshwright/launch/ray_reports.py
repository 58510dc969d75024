"""Tells Ray Train of a run's metrics and checkpoints, and the run of a wish to stop: a hook on every rank.

`ray.train.report` is a meeting of all workers, and Ray's controller takes one report at a time. So a thread makes the
reports, and the training waits for it only when it is far behind. Reports are met by their number, not by what they
say: every rank makes one for each step that is logged and one for each save, whatever became of it.

A checkpoint that is reported is a whole checkpoint of ours. In a local folder its files are linked, not copied: Ray
removes its links and the run its own, and neither harms the other.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import pyarrow.fs
import ray
import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode

from meshwright.checkpoint.format import read_manifest, step_name
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.saver import Outcome
from meshwright.errors import CheckpointError
from meshwright.training.checkpoints import SaveCheckpoints
from meshwright.training.hooks import Hook, Metrics

if TYPE_CHECKING:
    from meshwright.training.loop import TrainingLoop

BEHIND = 32
"""Reports that may wait before the training does."""
ASK_S = 0.5
REFERENCE = "meshwright.txt"
"""In a checkpoint of Ray's that stands for one in an object store: its address."""


@dataclass(frozen=True)
class _Report:
    metrics: dict[str, Any]
    checkpoint: Checkpoint | None = None
    name: str | None = None
    logged: int | None = None
    """The step, where it is that of a logged one."""


class Reports(Hook):
    """Metrics of every logged step and every checkpoint, for Ray; and Ray's wishes, for the run."""

    def __init__(self, desk: Any, group: str) -> None:
        self._desk, self._group = desk, group
        self._waiting: Queue[_Report | None] = Queue(BEHIND)
        self._failure: BaseException | None = None
        self._trainer: TrainingLoop | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report_all, name="ray-reports", daemon=True)

    def at_start(self, trainer: TrainingLoop) -> None:
        self._trainer = trainer
        saves = next(hook for hook in trainer.hooks if isinstance(hook, SaveCheckpoints))
        saves.listeners.append(self._saved)
        known: set[str] = set()
        if trainer.world.is_first:
            known = _known()
            threading.Thread(target=self._listen, args=(trainer,), name="ray-wishes", daemon=True).start()
        self._thread.start()
        self._catch_up(trainer)
        if trainer.resumed_from is None:
            return
        step = trainer.resumed_from.step
        if step_name(step) in known:
            self._put(_Report({"step": step}))
        else:
            # The ranks before have ended between a save and its report; what the other ranks say does not count.
            self._put_checkpoint(step)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if trainer.finished or trainer.stopping or _is_logged(trainer, trainer.step, metrics):
            step = trainer.step
            told = _numbers(metrics, step) if trainer.world.is_first else {"step": step}
            self._put(_Report(told, logged=step))

    def at_end(self, trainer: TrainingLoop) -> None:
        self._put(None)
        self._thread.join()
        self._raise_failure()

    def close(self) -> None:
        self._ended.set()

    def _catch_up(self, trainer: TrainingLoop) -> None:
        """Report the logged steps that the ranks before had done and not reported, and that are not done again."""
        missed: list[dict[str, Any]] = []
        if trainer.world.is_first and trainer.resumed_from is not None:
            told = ray.get(self._desk.told_before.remote())
            if told is not None:
                missed = [
                    row for row in trainer.job.folder.read_metrics() if told < row["step"] <= trainer.resumed_from.step
                ]
                missed = [row for row in missed if _is_logged(trainer, int(row["step"]), row)]
        trainer.exchange.collect(None)
        count: int = trainer.exchange.answer([len(missed)] * trainer.exchange.size)
        for row in missed or [{}] * count:
            self._put(_Report(_numbers(row, int(row["step"])), logged=int(row["step"])) if row else _Report({}))

    def _saved(self, outcome: Outcome) -> None:
        if outcome.error is not None or outcome.damage:
            self._put(_Report({"step": outcome.step}))
        else:
            self._put_checkpoint(outcome.step)

    def _put_checkpoint(self, step: int) -> None:
        """Have the checkpoint of a step reported: by the first rank, in which all take part."""
        assert self._trainer is not None
        report = _Report({"step": step})
        if self._trainer.world.is_first:
            place = self._trainer.checkpoints.child(step_name(step))
            with suppress(CheckpointError, FileNotFoundError):  # It may be removed already; then a newer one is there.
                metrics = _numbers(read_manifest(place).metrics, step)
                report = _Report(metrics, *_for_ray(place, step))
        self._put(report)

    def _put(self, report: _Report | None) -> None:
        self._raise_failure()
        self._waiting.put(report)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"Ray does not take reports any more: {self._failure}") from self._failure

    def _report_all(self) -> None:
        assert self._trainer is not None
        first = self._trainer.world.is_first
        before: int | None = None
        while (report := self._waiting.get()) is not None:
            if self._failure is not None:
                continue  # Nobody is to wait for room.
            try:
                if first:
                    self._desk.announce.remote(self._group)
                _tell(report)
                if first and before is not None:
                    # Ray's queue has room for one: with this report in it, the one before was taken out.
                    self._desk.tell.remote(before)
                before = report.logged if report.logged is not None else before
            except BaseException as error:
                self._failure = error
        if first:
            self._desk.leave.remote(self._group)

    def _listen(self, trainer: TrainingLoop) -> None:
        """Hear whether the run is to end."""
        while not self._ended.wait(ASK_S):
            with suppress(ray.exceptions.RayError):
                wish = ray.get(self._desk.wish.remote())
                if wish is not None:
                    trainer.stop(wish)
                    return


def follow(desk: Any, group: str) -> None:
    """Take part in the reports as a worker that has nothing to train, until they are all made or a rank gives up."""
    made = 0
    while True:
        announced, over = ray.get(desk.reports.remote(group))
        for _ in range(made, announced):
            ray.train.report({})
        made = announced
        if over or ray.get(desk.verdict.remote()) is not None:
            return
        time.sleep(ASK_S)


def _is_logged(trainer: TrainingLoop, step: int, metrics: Mapping[str, float]) -> bool:
    return step % trainer.config.observe.log_every == 0 or "eval_loss" in metrics


def _tell(report: _Report) -> None:
    if report.checkpoint is None:
        ray.train.report(report.metrics)
        return
    local = _storage() is not None
    mode = CheckpointUploadMode.NO_UPLOAD if local else CheckpointUploadMode.SYNC
    ray.train.report(
        report.metrics,
        checkpoint=report.checkpoint,
        checkpoint_dir_name=report.name,
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=False,
    )


def _numbers(metrics: Mapping[str, float], step: int) -> dict[str, Any]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)} | {"step": step}


def _storage() -> Path | None:
    """Ray's folder of this run, where it is one of this machine's."""
    storage = ray.train.get_context().get_storage()
    local = isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
    return Path(storage.experiment_fs_path) if local else None


def _known() -> set[str]:
    """Names of the checkpoints that Ray has; what else lies in its folder is of reports that were cut off, and goes."""
    reported = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
    names = {Path(one.checkpoint.path).name for one in reported}
    storage = _storage()
    for folder in storage.glob("step-*") if storage is not None else ():
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)
    return {name.partition("+")[0] for name in names}


def _for_ray(place: Any, step: int) -> tuple[Checkpoint, str]:
    """A checkpoint as Ray takes it, and its name there."""
    storage = _storage()
    name = step_name(step)
    if storage is None:
        if isinstance(place, LocalPlace):
            return Checkpoint.from_directory(str(place.path)), name
        return Checkpoint(str(place)), name
    # A name that is there is of a step that was done again after a rollback.
    names = itertools.chain([name], (f"{name}+{number}" for number in itertools.count(2)))
    target = next(storage / one for one in names if not (storage / one).exists())
    if isinstance(place, LocalPlace):
        _link(Path(place.path), target)
    else:
        target.mkdir()
        (target / REFERENCE).write_text(f"{place}\n", encoding="utf-8")
    return Checkpoint.from_directory(str(target)), target.name


def _link(source: Path, target: Path) -> None:
    """The files of a folder under another name, without copies where the disk is the same."""

    def one(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            shutil.copy2(old, new)

    try:
        shutil.copytree(source, target, copy_function=one)
    except shutil.Error as error:
        shutil.rmtree(target, ignore_errors=True)
        raise FileNotFoundError(str(error)) from None
