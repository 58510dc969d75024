"""Exporters: metrics on their way to whoever may be slow, far or dead, without a step that waits.

A step only puts its metrics in a queue. A thread takes them out and talks to the service. What does not fit into the
queue is lost there, the oldest first, and counted; metrics.jsonl has it all. A service that fails is told once and left
alone; at the end it gets a few seconds and is then abandoned.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.observe.tensorboard import TAGS
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

ROOM = 1024
"""Steps that wait in a queue at most."""
TOGETHER = 256
"""Steps that an exporter is given at most at a time."""
PATIENCE_S = 10.0
"""How long an exporter may take to finish at the end of a run, ..."""
PATIENCE_AFTER_ERROR_S = 1.0
"""... and where an error ended it: nobody restarts what still waits for a service."""


@dataclass(frozen=True)
class Record:
    """What is exported of a step."""

    step: int
    time: float
    values: dict[str, float]
    """By TensorBoard's tags."""


class Exporter(ABC):
    """Someone who takes metrics; used by one thread only, which is not that of the training."""

    name: str
    """As a line for people calls it."""

    @abstractmethod
    def open(self) -> None:
        """Connect; the run goes on meanwhile."""

    @abstractmethod
    def send(self, records: Sequence[Record]) -> None:
        """Send metrics of some steps, the oldest first."""

    @abstractmethod
    def close(self, completed: bool) -> None:
        """Finish, after the last record."""

    def abandon(self) -> None:  # noqa: B027
        """Nobody waits for it any longer, at the end or after a failure: leave nothing behind that runs on."""


class Queue:
    """The records that wait for an exporter, and the thread that brings them."""

    def __init__(self, exporter: Exporter, room: int = ROOM) -> None:
        self._exporter = exporter
        self._room = room
        self._waiting: deque[Record] = deque()
        self._changed = threading.Condition()
        self._news: deque[tuple[str, str]] = deque()
        self.ended = False
        """Whether nothing more comes."""
        self._completed = False
        self._failed = self._abandoned = False
        self._patience_s = self._deadline = 0.0
        self.dropped = 0
        """Records that did not fit."""
        self._thread = threading.Thread(target=self._work, name=f"export to {exporter.name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Leave a record for the exporter; takes microseconds, whatever that does."""
        if self._failed:
            return
        with self._changed:
            if len(self._waiting) >= self._room:
                self._waiting.popleft()
                self.dropped += 1
                if self.dropped == 1:
                    self._news.append(
                        ("slow", f"takes metrics too slowly: {self._room} steps wait, older ones are lost")
                    )
            self._waiting.append(record)
            self._changed.notify()

    def news(self) -> list[tuple[str, str]]:
        """What has happened since the last call, (kind, text): failures, losses."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def finish(self, completed: bool, patience_s: float) -> None:
        """Nothing more comes: the exporter has that time from now on."""
        with self._changed:
            self.ended, self._completed, self._patience_s = True, completed, patience_s
            self._deadline = time.monotonic() + patience_s
            self._changed.notify()

    def close(self) -> None:
        """Wait for the exporter until its time is up, and go on without it."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                left = len(self._waiting)
                self._waiting.clear()
            self._abandoned = True
            self._exporter.abandon()
            waiting = f", with {left} steps unsent" if left else ""
            self._news.append(("abandoned", f"has not finished in {self._patience_s:g} s and is left behind{waiting}"))
        if self.dropped:
            self._news.append(("dropped", f"has missed {self.dropped} steps; metrics.jsonl has them"))

    def _work(self) -> None:
        try:
            self._exporter.open()
            while records := self._take():
                self._exporter.send(records)
            self._exporter.close(self._completed)
        except Exception as error:
            self._failed = True
            if self._abandoned:
                return
            self._exporter.abandon()
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._news.append(("failed", f"cannot be reached: {text}; the run goes on without it until its next start"))

    def _take(self) -> list[Record]:
        """The records that wait, as soon as there are any; none once it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.ended)
            return [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]


class Export(Hook):
    """Gives the first rank's metrics to an exporter, through a queue."""

    def __init__(self, make: Callable[[TrainingLoop], Exporter]) -> None:
        self._make = make
        self._trainer: TrainingLoop | None = None
        self._exporter: Exporter | None = None
        self._queue: Queue | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first and not trainer.finished:
            self._trainer = trainer
            self._exporter = self._make(trainer)
            self._queue = Queue(self._exporter)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self._queue is not None:
            values = {tag: metrics[name] for name, tag in TAGS.items() if name in metrics}
            self._queue.put(Record(trainer.step, time.time(), values))
            self._tell()

    def at_end(self, trainer: TrainingLoop) -> None:
        # All exporters finish at the same time, while hooks that come later save and say goodbye.
        if self._queue is not None:
            self._queue.finish(completed=True, patience_s=PATIENCE_S)

    def close(self) -> None:
        if self._queue is not None:
            if not self._queue.ended:
                self._queue.finish(completed=False, patience_s=PATIENCE_AFTER_ERROR_S)
            self._queue.close()
            self._tell()

    def _tell(self) -> None:
        """From the training's own thread, as everything else that is told."""
        assert self._queue is not None
        for kind, text in self._queue.news():
            assert self._trainer is not None
            assert self._exporter is not None
            print(f"meshwright: {self._exporter.name} {text}", file=sys.stderr, flush=True)
            self._trainer.job.folder.event("exporter", exporter=self._exporter.name, state=kind, text=text)
