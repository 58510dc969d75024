"""What a rank holds of a checkpoint's tensors, and DCP's planners over it.

A rank's part of a tensor is cut into pieces of at most 64 MiB along its first dimension, so that a reader that needs a
few rows need not read, and check the digest of, the rest; a part that lies in several places of the whole, since a
dimension of it is packed, is cut between them too. Which rank writes a piece that several hold, and which saved pieces
a rank reads to fill its part under another strategy, is what PyTorch's planners find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.format import Manifest, Piece
from meshwright.errors import CheckpointError
from meshwright.models.parts import box_of, packs_of, unpacked
from meshwright.optim.codes import Coded

LARGEST_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Held:
    """A rank's part of a tensor: its values, and where they lie in the whole."""

    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""
    coded: Coded | None = None
    """Where the values are codes of 8 bits: what they mean. A checkpoint holds that, in float32."""
    packed: tuple[int, int] | None = None
    """The dimension in which the values lie in several places, and how many these are."""

    @staticmethod
    def of(tensor: Tensor) -> Held:
        """This rank's part of a tensor that may be split."""
        packed = packs_of(tensor)
        local, offset, shape = box_of(unpacked(tensor.detach()))
        if packed is not None:
            dim = packed[0]
            local, shape = local.flatten(dim, dim + 1), tuple(tensor.shape)
            offset = (*offset[:dim], *offset[dim + 1 :])
        return Held(local, offset, shape, packed=packed)

    def places(self) -> list[Held]:
        """What lies in one place each."""
        if self.packed is None:
            return [self]
        if self.coded is not None:
            raise CheckpointError(
                "moments in 8 bits of a packed dimension that tp cuts are not saved; keep moments in bf16 or float32"
            )
        dim, count = self.packed
        own, far = self.local.shape[dim] // count, self.shape[dim] // count
        return [
            Held(self.local.narrow(dim, index * own, own), _moved(self.offset, dim, index * far), self.shape)
            for index in range(count)
        ]

    def at(self, offset: Sequence[int]) -> Held:
        """The one of them in which a point of the whole lies."""
        if self.packed is None:
            return self
        dim, count = self.packed
        return self.places()[offset[dim] // (self.shape[dim] // count)]

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, as a checkpoint holds them."""
        return self.local.dtype if self.coded is None else torch.float32

    def values(self) -> Tensor:
        """All of them; those of codes are made for the caller."""
        return self.local if self.coded is None else self.coded.whole()

    def rows(self, first: int, count: int) -> Tensor:
        """Some rows of the values; those of codes are made for the caller."""
        return self.local[first : first + count] if self.coded is None else self.coded.rows(first, count)


def _moved(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :])


Parts = Mapping[str, Held]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as manifests write it."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor that lies in one piece on the host."""
    memory: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def _rows(held: Held) -> Iterator[tuple[int, int]]:
    """The first row and the number of rows of each piece of a part."""
    rows = held.local.shape[0] if held.local.ndim else 0
    if not rows:
        yield 0, 0
        return
    step = max(1, LARGEST_PIECE // max(1, held.local[0].numel() * held.dtype.itemsize))
    yield from ((first, min(step, rows - first)) for first in range(0, rows, step))


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the saving of parts; give `dcp.save` a dictionary of `Held`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts: Parts = {}

    def set_up_planner(
        self, state_dict: Parts, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.parts = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        places = ((name, place) for name, held in self.parts.items() for place in held.places())
        self.plan = SavePlan([item for name, held in places for item in _write_items(name, held)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        held = self.parts[write_item.index.fqn].at(chunk.offsets)
        if not held.local.ndim:
            return held.local
        return held.rows(chunk.offsets[0] - held.offset[0], chunk.sizes[0])


def _write_items(name: str, held: Held) -> Iterator[WriteItem]:
    if held.local.numel() == 0 and prod(held.shape) > 0:
        return
    for first, rows in _rows(held):
        offset, shape = list(held.offset), list(held.local.shape)
        if shape:
            offset[0] += first
            shape[0] = rows
        yield write_item(name, offset, shape, held.dtype, held.shape)


def write_item(
    name: str, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype, whole: Sequence[int]
) -> WriteItem:
    """A piece, as PyTorch's planners describe it."""
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(whole))
    return WriteItem(index=MetadataIndex(name, offset), type=WriteItemType.SHARD, tensor_data=data)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the loading into parts: missing names, other shapes and other dtypes are errors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts: Parts = {}

    def set_up_planner(self, state_dict: Parts, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.parts = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, held in self.parts.items():
            saved = self.metadata.state_dict_metadata.get(name)
            check_fits(name, held, saved)
            assert isinstance(saved, TensorStorageMetadata)
            if held.local.numel():
                wanted = [ChunkStorageMetadata(torch.Size(one.offset), one.local.shape) for one in held.places()]
                items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.fqn].at(index.offset).local


def check_fits(name: str, held: Held, saved: Any) -> None:
    """Raise unless a tensor of a checkpoint is what a part wants."""
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no tensor {name}; it is of another model, or of another optimizer")
    found, wanted = (dtype_name(saved.properties.dtype), tuple(saved.size)), (dtype_name(held.local.dtype), held.shape)
    if found != wanted:
        raise CheckpointError(
            f"{name} is {found[0]} {list(found[1])} in the checkpoint and {wanted[0]} {list(wanted[1])} here; "
            "give the model and the precision that it was saved with"
        )


def metadata_of(manifest: Manifest) -> Metadata:
    """A manifest as PyTorch's planners read it."""
    tensors: dict[str, Any] = {}
    pieces: dict[MetadataIndex, Piece] = {}
    for name, entry in manifest.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in entry.pieces]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        pieces |= {MetadataIndex(name, piece.offset): piece for piece in entry.pieces}
    return Metadata(tensors, storage_data=pieces)
