"""Save checkpoints while training goes on.

The step is held up only while the ranks agree who writes what and copy that to host memory. A thread then writes,
commits, reads the files again to see that they are what was meant, and removes old checkpoints. There is one save at a
time; what became of it, good or bad, is told at the next opportunity and never swallowed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from meshwright.checkpoint.checked import Damage, find_damage
from meshwright.checkpoint.format import FileEntry, Manifest, Piece, step_name
from meshwright.checkpoint.marks import mark
from meshwright.checkpoint.pace import Pace
from meshwright.checkpoint.pieces import Parts, PieceSavePlanner, dtype_name, write_item
from meshwright.checkpoint.place import Place
from meshwright.checkpoint.retention import Retention, prune
from meshwright.checkpoint.writer import CheckpointWriter, Stored, piece_bytes
from meshwright.errors import CheckpointError, StoreError, UserError
from meshwright.parallel.exchange import Exchange

NICE = 10
"""How far the writing thread steps back for those that train."""


@dataclass(frozen=True)
class Outcome:
    """What became of a save."""

    step: int
    seconds: float
    """From the call until it was durable, or had failed."""
    stalled: float
    """How long training was held up."""
    nbytes: int = 0
    error: str | None = None
    damage: tuple[Damage, ...] = ()
    """What reading it again found."""
    unseen: str | None = None
    """Why it could not be read again: it is neither known to be whole nor damaged."""
    pruned: tuple[int, ...] = ()


@dataclass
class _Planned:
    """Who writes what, which stays the same from save to save."""

    listing: list[Any]
    mine: list[WriteItem]
    nbytes: int = 0
    """Of all ranks, on the first one; so are the next two."""
    metadata: Metadata | None = None
    everyone: list[Any] = field(default_factory=list)


class Saver:
    """Saves the checkpoints of one run; every rank has one."""

    def __init__(
        self,
        checkpoints: Place,
        exchange: Exchange,
        retention: Retention,
        *,
        verify: bool = True,
        cpu_share: float = 1.0,
        before_commit: Callable[[], None] = lambda: None,
        at: Callable[[str, int], Any] = lambda place, step: None,
    ) -> None:
        self.checkpoints = checkpoints
        self.exchange = exchange
        self.retention = retention
        self.verify = verify
        self.cpu_share = cpu_share
        """Of a core, that a save in the background may take from the training."""
        self.staged_step = self.durable_step = -1
        self._before_commit = before_commit
        self._at = at
        self._planned: _Planned | None = None
        self._staging = _Staging()
        self._pace = Pace()
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, facts: Manifest, parts: Parts, *, background: bool) -> None:
        """Save this rank's parts as a checkpoint with these facts; returns when they are staged, or all is done."""
        self.wait()
        started = time.perf_counter()
        self._at("stage", facts.step)
        planner = PieceSavePlanner()
        planner.set_up_planner(parts, is_coordinator=self.exchange.is_first)
        self._pace = Pace(self.cpu_share if background else 1.0)
        writer = CheckpointWriter(
            self.checkpoints,
            facts,
            before_commit=self._before_commit,
            at=lambda place: self._at(place, facts.step),
            pace=self._pace,
        )
        try:
            planned, key = self._plan(planner, writer)
        except CheckpointError as error:
            seconds = time.perf_counter() - started
            self._outcomes.put(Outcome(facts.step, seconds, seconds, error=str(error)))
            return
        plan = SavePlan(planned.mine, storage_data={"key": key, "rank": self.exchange.rank})
        job = _Job(facts.step, writer, plan, planner, planned, started)
        if background:
            job.planner = self._staging.stage(planner, planned.mine)
        job.stalled = time.perf_counter() - started
        self.staged_step = facts.step
        self._at("staged", facts.step)
        if background:
            self._thread = threading.Thread(target=self._finish_aside, args=(job,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._finish(job)

    def outcomes(self) -> list[Outcome]:
        """What became of the saves since the last call."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        return found

    def hurry(self) -> None:
        """Hold a save that is in flight back no more."""
        self._pace.hurry()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no save is in flight; it is no longer held back."""
        if self._thread is not None:
            self.hurry()
            self._thread.join(timeout_s)

    def _plan(self, planner: PieceSavePlanner, writer: CheckpointWriter) -> tuple[_Planned, str]:
        """Agree who writes what, begin the folder; what was agreed at an earlier save holds while nothing changed."""
        items = planner.create_local_plan().items
        listing = [_described(item) for item in items]
        planned = self._planned
        if planned is None or planned.listing != listing:
            planned = _Planned(listing, [])
        said = self.exchange.collect(None if planned is self._planned else listing)
        answers: list[Any] = []
        if self.exchange.is_first:
            try:
                chosen = self._choose(said, planner, planned)
                key = writer.begin(planned.nbytes)
                answers = [{"key": key, "mine": mine} for mine in chosen]
            except Exception as error:  # Whatever it is, the others wait for an answer.
                answers = [{"error": _said(error)}] * self.exchange.size
        answer = self.exchange.answer(answers)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        if answer["mine"] is not None:
            planned.mine = [items[index] for index in answer["mine"]]
        self._planned = planned
        return planned, answer["key"]

    def _choose(self, said: Sequence[Any], planner: PieceSavePlanner, planned: _Planned) -> list[Any]:
        """For each rank which of its pieces it writes; None where all holds that was agreed before."""
        if all(listing is None for listing in said):
            return [None] * len(said)
        before = self._planned.everyone if self._planned is not None else [None] * len(said)
        planned.everyone = [new if new is not None else old for new, old in zip(said, before, strict=True)]
        plans = [SavePlan([_item(entry) for entry in listing]) for listing in planned.everyone]
        chosen, planned.metadata = planner.create_global_plan(plans)
        planned.nbytes = sum(piece_bytes(item) for plan in chosen for item in plan.items)
        mine = []
        for plan, listing in zip(chosen, planned.everyone, strict=True):
            taken = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
            mine.append([index for index, entry in enumerate(listing) if (entry[0], tuple(entry[1])) in taken])
        return mine

    def _finish_aside(self, job: _Job) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Write, commit, look again, clear up; every end of it is an outcome."""
        try:
            error = self._write(job)
            seconds = time.perf_counter() - job.started
            if error is not None:
                self._outcomes.put(Outcome(job.step, seconds, job.stalled, error=error))
                return
            self.durable_step = job.step
            damage, unseen, pruned = self._look_again(job)
            nbytes = job.planned.nbytes
            self._outcomes.put(
                Outcome(
                    job.step,
                    seconds,
                    job.stalled,
                    nbytes,
                    damage=tuple(damage),
                    unseen=unseen,
                    pruned=tuple(pruned),
                )
            )
        except Exception as error:  # The thread's own end: whoever asks for outcomes hears of it.
            if self.durable_step != job.step:
                with suppress(Exception):
                    job.writer.abandon()
            seconds = time.perf_counter() - job.started
            self._outcomes.put(Outcome(job.step, seconds, job.stalled, error=_said(error)))

    def _write(self, job: _Job) -> str | None:
        """Write and commit; gives what went wrong."""
        try:
            results = job.writer.write_data(job.plan, job.planner).value()
            said: dict[str, Any] = {"stored": [_told(result) for result in results]}
        except Exception as error:  # Whatever it is, the first rank waits for a word.
            said = {"error": f"rank {self.exchange.rank} on {socket.gethostname()}: {_said(error)}"}
        everyone = self.exchange.collect(said)
        failed: str | None = None
        if self.exchange.is_first:
            errors = [told["error"] for told in everyone if "error" in told]
            try:
                if errors:
                    raise CheckpointError("; ".join(errors))
                assert job.planned.metadata is not None
                job.writer.finish(job.planned.metadata, [[_heard(one) for one in told["stored"]] for told in everyone])
            except Exception as failure:
                failed = _said(failure)
        answer: str | None = self.exchange.answer([failed] * self.exchange.size)
        if answer is not None:
            with suppress(Exception):
                job.writer.abandon()
        return answer

    def _look_again(self, job: _Job) -> tuple[list[Damage], str | None, list[int]]:
        """Every rank reads what it wrote; the first one remembers the result and removes what need not stay.

        Gives what is damaged, why it could not be read, and what was removed.
        """
        if not self.verify:
            return [], None, []
        folder = self.checkpoints.child(step_name(job.step))
        own, unseen = job.writer.written, None
        try:
            found = find_damage(folder, own, threads=1, between=self._pace.breathe)
        except StoreError as error:
            found, unseen = [], str(error)
        except Exception as error:
            found = [Damage(", ".join(sorted(own)), None, f"{folder} cannot be read again: {_said(error)}")]
        everyone = self.exchange.collect([unseen, [[one.file, one.tensor, one.what] for one in found]])
        pruned = []
        damage = [Damage(*one) for _, told in everyone for one in told]
        if self.exchange.is_first:
            unseen = next((why for why, _ in everyone if why is not None), None)
            try:
                if damage or unseen is None:
                    mark(folder, damage)
                self._at("retention", job.step)
                if not damage and unseen is None:
                    pruned = prune(self.checkpoints, self.retention)
            except StoreError as error:
                unseen = str(error)
            except Exception as error:
                damage.append(Damage(step_name(job.step), None, f"{self.checkpoints}: {_said(error)}"))
        told = [unseen, [[one.file, one.tensor, one.what] for one in damage]]
        unseen, damaged = self.exchange.answer([told] * self.exchange.size)
        return [Damage(*one) for one in damaged], unseen, pruned


@dataclass
class _Job:
    step: int
    writer: CheckpointWriter
    plan: SavePlan
    planner: Any
    planned: _Planned
    started: float
    stalled: float = 0.0


class _Staging:
    """Host memory that the pieces of a save are copied to; it is kept for the next one."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def stage(self, planner: PieceSavePlanner, items: Sequence[WriteItem]) -> _StagedPlanner:
        """Copy what the items mean."""
        starts, end = [], 0
        for item in items:
            starts.append(end)
            end += -(-piece_bytes(item) // 16) * 16
        on_gpu = any(planner.parts[item.index.fqn].local.is_cuda for item in items)
        if self._buffer is None or len(self._buffer) < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        staged = {}
        for item, start in zip(items, starts, strict=True):
            # One at a time: values of codes take memory while they are copied.
            source = planner.resolve_data(item)
            memory = self._buffer[start : start + source.nbytes]
            copy = memory.view(source.dtype).view(source.shape)
            copy.copy_(source, non_blocking=on_gpu)
            staged[item.index] = copy
        if on_gpu:
            torch.cuda.synchronize()
        return _StagedPlanner(staged)


class _StagedPlanner(PieceSavePlanner):
    """Gives the writer what was staged."""

    def __init__(self, staged: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._staged[write_item.index]


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _described(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None
    dtype = dtype_name(data.properties.dtype)
    return [item.index.fqn, list(data.chunk.offsets), list(data.chunk.sizes), dtype, list(data.size)]


def _item(entry: Sequence[Any]) -> WriteItem:
    name, offset, shape, dtype, whole = entry
    return write_item(name, offset, shape, getattr(torch, dtype), whole)


def _told(result: WriteResult) -> list[Any]:
    stored: Stored = result.storage_data
    return [result.index.fqn, result.size_in_bytes, stored.piece.model_dump(), stored.entry.model_dump()]


def _heard(told: Sequence[Any]) -> WriteResult:
    name, nbytes, piece, entry = told
    stored = Stored(Piece.model_validate(piece), FileEntry.model_validate(entry))
    return WriteResult(MetadataIndex(name, stored.piece.offset), nbytes, stored)
