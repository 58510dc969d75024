"""What differs between two checkpoints, tensor by tensor, whatever strategies they were saved under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.place import Place
from meshwright.checkpoint.reader import CheckpointReader, load_one


@dataclass(frozen=True)
class Difference:
    """How a tensor differs."""

    name: str
    what: str
    """In words, when it cannot be measured; else empty."""
    elements: int = 0
    """How many are not the same bits."""
    of: int = 0
    largest: float = 0.0
    """The largest difference of two elements."""
    relative: float = 0.0
    """The norm of the difference over the norm of the first."""


def differences(one: Place, other: Place, prefix: str = "") -> Iterator[Difference]:
    """The tensors that differ, in their order."""
    first, second = CheckpointReader(one), CheckpointReader(other)
    names = dict.fromkeys([*first.manifest.tensors, *second.manifest.tensors])
    for name in names:
        if not name.startswith(prefix):
            continue
        here, there = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
        if here is None or there is None:
            yield Difference(name, f"only in {one if there is None else other}")
        elif (here.shape, here.dtype) != (there.shape, there.dtype):
            yield Difference(name, f"{here.dtype} {list(here.shape)} and {there.dtype} {list(there.shape)}")
        else:
            found = _measure(name, load_one(first, name), load_one(second, name))
            if found.elements:
                yield found


def _measure(name: str, here: Tensor, there: Tensor) -> Difference:
    raw_here, raw_there = (value.reshape(-1, 1).view(torch.uint8).reshape(value.numel(), -1) for value in (here, there))
    elements = int((raw_here != raw_there).any(dim=1).sum())
    a, b = here.double(), there.double()
    gap = (a - b).abs()
    largest = float(gap.max()) if gap.numel() else 0.0
    norm = float(a.norm())
    relative = float((a - b).norm()) / norm if norm else float("inf") if elements else 0.0
    return Difference(name, "", elements, here.numel(), largest, relative)
