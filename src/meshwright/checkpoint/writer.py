"""DCP's storage of a checkpoint, the writing side: safetensors files, digests, a manifest last, one rename.

Every rank writes the pieces that the plan gives it into files of its own. A checkpoint is whole or not there: a crash
or a full disk leaves the earlier ones untouched.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from meshwright.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    digest_of,
    step_name,
    write_manifest,
)
from meshwright.checkpoint.pace import Pace
from meshwright.checkpoint.pieces import bytes_of, dtype_name
from meshwright.checkpoint.place import Place, no_space, open_place
from meshwright.checkpoint.safetensors_file import dtype_bytes, make_header
from meshwright.errors import CheckpointError

AT_A_TIME = 4 * 2**20
"""How many bytes are written before training is let through."""


@dataclass(frozen=True)
class Stored:
    """Where a piece was written."""

    piece: Piece
    entry: FileEntry


def _nothing(place: str) -> None:
    """At the places of a save where a test may want a fault."""


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint into a place of checkpoints; `facts` is its manifest without the tensors."""

    def __init__(
        self,
        checkpoints: Place | str | os.PathLike[str],
        facts: Manifest,
        *,
        before_commit: Callable[[], None] = lambda: None,
        at: Callable[[str], Any] = _nothing,
        pace: Pace | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self.checkpoints = checkpoints if isinstance(checkpoints, Place) else open_place(os.fspath(checkpoints))
        self.facts = facts
        self.before_commit = before_commit
        self.at = at
        self.begun: Place | None = None
        self.committed: Place | None = None
        self.written: set[str] = set()
        """The files of this rank."""
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP: a new save begins."""
        self.begun = self.committed = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP: who this rank is."""
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP: refuse what is no tensor."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn} is not a tensor; a checkpoint keeps other values as JSON in the manifest's state"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator: see that there is room and that the step is new, and begin a folder for all."""
        needed = sum(piece_bytes(item) for plan in plans for item in plan.items)
        key = self.begin(needed)
        return [dataclasses.replace(plan, storage_data={"key": key, "rank": rank}) for rank, plan in enumerate(plans)]

    def begin(self, needed: int) -> str:
        """Begin a folder for that many bytes; gives its key for the other ranks."""
        name = step_name(self.facts.step)
        if self.checkpoints.holds(name):
            raise CheckpointError(f"{self.checkpoints.path_of(name)} is there already and is never overwritten")
        self.begun = self.checkpoints.begin(name)
        free = self.checkpoints.free()
        if free is not None and needed > free:
            message = no_space(self.checkpoints, needed, f"the checkpoint of step {self.facts.step}")
            self.abandon()
            raise CheckpointError(message)
        return self.begun.key()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces; all of them are on the disk when this returns."""
        where = plan.storage_data or {"key": self.begin(0), "rank": 0}
        self.begun = self.checkpoints.rejoin(where["key"])
        results = list(self._write(plan.items, planner, where["rank"]))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, items: Iterable[WriteItem], planner: SavePlanner, rank: int) -> Iterator[WriteResult]:
        files: dict[str, list[WriteItem]] = {}
        for item in items:
            files.setdefault(f"{item.index.fqn.split('.')[0]}-{rank:05d}.safetensors", []).append(item)
        assert self.begun is not None
        for file, held in files.items():
            name = self.begun.own_name(file)
            self.written.add(name)
            yield from self._write_file(name, held, planner)

    def _write_file(self, file: str, items: list[WriteItem], planner: SavePlanner) -> Iterator[WriteResult]:
        assert self.begun is not None
        names = {_piece_name(item): _described(item) for item in items}
        raw, header = make_header(names)
        entry = FileEntry(nbytes=header.file_bytes, header=header.digest)
        left = header.file_bytes
        results = []
        try:
            with self.begun.create(file) as target:
                target.write(raw)
                left -= len(raw)
                for name, item in zip(names, items, strict=True):
                    self.at("write")
                    value = planner.resolve_data(item)
                    assert isinstance(value, Tensor)
                    data = bytes_of(value.detach().cpu().contiguous())
                    for start in range(0, len(data), AT_A_TIME):
                        target.write(data[start : start + AT_A_TIME])
                        self.pace.breathe()
                    left -= len(data)
                    piece = Piece(
                        file=file,
                        name=name,
                        offset=tuple(_chunk(item).offsets),
                        shape=tuple(_chunk(item).sizes),
                        digest=digest_of(data),
                    )
                    results.append(WriteResult(item.index, len(data), Stored(piece, entry)))
        except OSError as error:
            path = self.begun.path_of(file)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(no_space(self.checkpoints, left, f"the rest of {file}")) from error
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        yield from results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator: everything is on the disk; write the manifest and commit."""
        stored = [(result.index.fqn, result.storage_data) for rank in results for result in rank]
        pieces: dict[str, list[Piece]] = {}
        for name, one in stored:
            pieces.setdefault(name, []).append(one.piece)
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = dtype_name(tensor.properties.dtype)
            tensors[name] = TensorEntry(shape=tuple(tensor.size), dtype=dtype, pieces=tuple(pieces[name]))
        files = {one.piece.file: one.entry for _, one in stored}
        self.commit(self.facts.model_copy(update={"tensors": tensors, "files": files}))

    def commit(self, manifest: Manifest) -> None:
        """See that all files are there, write the manifest, make the checkpoint visible."""
        assert self.begun is not None
        try:
            self._see_files(manifest)
            self.at("commit")
            # Before the manifest: in a store that has no renames it is the commit.
            self.before_commit()
            with self.begun.create(MANIFEST) as target:
                target.write(write_manifest(manifest))
            self.at("rename")
            self.committed = self.checkpoints.publish(self.begun, step_name(manifest.step))
            self.begun = None
            self.at("committed")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(no_space(self.checkpoints, 1, f"the manifest of step {manifest.step}")) from error
            raise CheckpointError(f"{self.checkpoints} cannot be written: {error.strerror or error}") from error

    def _see_files(self, manifest: Manifest) -> None:
        assert self.begun is not None
        for file, entry in manifest.files.items():
            try:
                found = self.begun.size(file)
            except FileNotFoundError:
                found = -1
            if found != entry.nbytes:
                raise CheckpointError(
                    f"{self.begun.path_of(file)} was written by a rank and cannot be seen by the first one; "
                    "run.dir, or checkpoint.dir, must be on storage that all machines share"
                )

    def abandon(self) -> None:
        """Remove what was begun, as far as it is this rank's."""
        if self.begun is not None:
            self.begun.discard(self.written)
            self.begun = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP: whether this storage is meant; it is always named."""
        return False


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _described(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    assert item.tensor_data is not None
    return dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)


def piece_bytes(item: WriteItem) -> int:
    """Of the piece, which may be a part of a tensor."""
    dtype, shape = _described(item)
    return int(torch.Size(shape).numel()) * dtype_bytes(dtype)


def _piece_name(item: WriteItem) -> str:
    """A whole tensor goes by its name, a part of one by its name and place."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    ends = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{','.join(f'{first}:{first + length}' for first, length in ends)}]"
