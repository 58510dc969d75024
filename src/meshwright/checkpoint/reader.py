"""DCP's storage of a checkpoint, the reading side: every piece that is read is checked against its digest.

A load that fails may have filled a part of what it was given: load another checkpoint over it, or drop it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.checkpoint.checked import CheckedFiles
from meshwright.checkpoint.format import Manifest, Piece
from meshwright.checkpoint.pieces import Held, Parts, PieceLoadPlanner, bytes_of, dtype_name, metadata_of
from meshwright.checkpoint.place import Place

THREADS = 4


class CheckpointReader(StorageReader):
    """Reads one checkpoint folder."""

    def __init__(self, folder: Place | str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self._files = CheckedFiles(folder, manifest)
        self.manifest = self._files.manifest

    def see(self, name: str) -> None:
        """Raise unless all pieces of a tensor are in their files, before anyone makes room for it."""
        entry = self.manifest.tensors[name]
        for piece in entry.pieces:
            self._files.length(piece, entry.dtype)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP: a new load begins."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP: what there is."""
        return metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP: where the pieces of what there is lie."""
        self._pieces: Mapping[Any, Piece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """DCP: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """DCP: nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan wants; several pieces at a time."""
        jobs: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            jobs.setdefault(item.storage_index, []).append(item)
        for file in {self._pieces[index].file for index in jobs}:
            self._files.header(file)
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(lambda job: self._fill(self._pieces[job[0]], job[1], planner), jobs.items()):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, piece: Piece, items: list[ReadItem], planner: LoadPlanner) -> None:
        targets = [(item, planner.resolve_tensor(item)) for item in items]
        dtype = targets[0][1].dtype
        self._files.length(piece, dtype_name(dtype))
        straight = _straight_target(piece, targets)
        value = straight if straight is not None else torch.empty(piece.shape, dtype=dtype)
        self._files.read(piece, bytes_of(value))
        for item, target in [] if straight is not None else targets:
            narrowed = value
            for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                narrowed = narrowed.narrow(dim, first, length)
            target.copy_(narrowed)
        for item, target in targets:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP: whether this storage is meant; it is always named."""
        return False


def _straight_target(piece: Piece, targets: list[tuple[ReadItem, Tensor]]) -> Tensor | None:
    """The memory that a piece can be read into as it is, if there is one."""
    _, target = targets[0]
    whole = len(targets) == 1 and tuple(target.shape) == piece.shape
    return target if whole and target.device.type == "cpu" and target.is_contiguous() else None


@torch.no_grad()
def load_parts(reader: CheckpointReader, parts: Parts) -> None:
    """Fill this rank's parts from a checkpoint, whatever strategy it was saved under."""
    planner = PieceLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(parts, metadata)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def load_one(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor of a checkpoint, whole and in host memory."""
    reader.see(name)
    entry = reader.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    load_parts(reader, {name: Held.of(tensor)})
    return tensor


def load_whole(folder: Place | str | os.PathLike[str], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start so, whole and in host memory."""
    reader = CheckpointReader(folder)
    return {name: load_one(reader, name) for name in reader.manifest.tensors if name.startswith(prefix)}
