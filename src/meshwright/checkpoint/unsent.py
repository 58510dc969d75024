"""What compression has not sent yet, in checkpoints: it belongs to the gradients of the run, and must not be lost.

`unsent.NAME` has a row for each data-parallel rank; `basis.NAME` is the same on all. With as many ranks as before each
goes on with its own row. With another number each takes an equal share of the sum of all rows: what all of them
together still have to send stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.reader import CheckpointReader, load_one, load_parts
from meshwright.comm.compressors import Compressor
from meshwright.errors import CheckpointError
from meshwright.strategy import Strategy

UNSENT, BASIS = "unsent", "basis"


def unsent_parts(compressor: Compressor | None) -> dict[str, Held]:
    """This rank's parts of what its compressor remembers."""
    if compressor is None:
        return {}
    rank, ranks = compressor.group.rank(), compressor.group.size()
    parts = {f"{UNSENT}.{name}": _row(one, rank, ranks) for name, one in compressor.unsent.items()}
    return parts | {f"{BASIS}.{name}": Held.of(one) for name, one in compressor.bases.items()}


def _row(one: Tensor, rank: int, ranks: int) -> Held:
    """What one of several ranks has, as a row of what all have."""
    return Held(one[None], (rank, *(0 for _ in one.shape)), (ranks, *one.shape))


def has_unsent(manifest: Manifest) -> bool:
    """Whether gradients were compressed before, by a kind that leaves something over."""
    return any(name.startswith(f"{UNSENT}.") for name in manifest.tensors)


def check_unsent(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise unless what is remembered is of the model's parameters, so that nothing larger is ever allocated."""
    for name, entry in manifest.tensors.items():
        kind, _, parameter = name.partition(".")
        shape = tuple(shapes.get(parameter, ()))
        if kind in (UNSENT, BASIS) and entry.dtype not in ("float32", "float64"):
            raise CheckpointError(f"the checkpoint's {name} is {entry.dtype}, and gradients are float32 or float64")
        if (kind == UNSENT and (parameter not in shapes or entry.shape[1:] != shape)) or (
            kind == BASIS and not (len(shape) > 1 and entry.shape[:1] == (prod(shape[1:]),) and len(entry.shape) == 2)
        ):
            raise CheckpointError(f"the checkpoint's {name} {list(entry.shape)} fits no parameter of its model")


def restore_unsent(reader: CheckpointReader, model: nn.Module, compressor: Compressor | None) -> bool:
    """Take up what was not sent; gives whether the checkpoint has such and this run cannot."""
    tensors = reader.manifest.tensors
    if compressor is None or not compressor.how.remembers:
        return has_unsent(reader.manifest)
    compressor.unsent.clear()
    compressor.bases.clear()
    lost = False
    for name, parameter in model.named_parameters():
        unsent, basis = f"{UNSENT}.{name}", f"{BASIS}.{name}"
        if unsent in tensors and compressor.remembers(parameter.shape):
            compressor.unsent[name] = _unsent(reader, unsent, parameter, compressor)
        elif unsent in tensors:
            lost = True
        # One of another number of columns is of no use: a new one is found in a few steps.
        if basis in tensors and tensors[basis].shape[1] == compressor.how.columns:
            compressor.bases[name] = load_one(reader, basis).to(parameter.device)
    return lost


def left_out(step: int, strategy: Strategy) -> str:
    """What is said where a run cannot take it up."""
    return (
        f"the checkpoint of step {step} has gradients that were not sent yet, and with {strategy} nobody would send "
        "them: they are left out"
    )


def _unsent(reader: CheckpointReader, name: str, parameter: nn.Parameter, compressor: Compressor) -> Tensor:
    """This rank's row; or its share of all rows."""
    entry, ranks = reader.manifest.tensors[name], compressor.group.size()
    reader.see(name)
    row = torch.empty(parameter.shape, dtype=getattr(torch, entry.dtype), device=parameter.device)
    if entry.shape[0] == ranks:
        load_parts(reader, {name: _row(row, compressor.group.rank(), ranks)})
        return row
    total = torch.zeros_like(row)
    # One by one, so that there is never more than one of them beside the sum.
    for number in range(entry.shape[0]):
        load_parts(reader, {name: _row(row, number, entry.shape[0])})
        total += row
    return total / ranks
