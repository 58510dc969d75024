"""Whether all that this rank holds of a run's state is numbers."""

from __future__ import annotations

import math
import socket

import torch
from torch import nn

from meshwright.checkpoint.training_state import parts_of
from meshwright.errors import CheckpointError, ExitCode
from meshwright.parallel.world import World


class NonFiniteState(CheckpointError):
    """Weights or moments are no longer numbers: such a state is never saved."""

    exit_code = ExitCode.DIVERGED


@torch.no_grad()
def nonfinite_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of tensors of which this rank holds something that is NaN or infinite; one pass over the memory."""
    # Of codes of 8 bits, scales are infinite where something was no number.
    parts = parts_of(model, optimizer).items()
    held = [(name, part.local if part.coded is None else part.coded.scales) for name, part in parts]
    held = [(name, local) for name, local in held if local.numel() and local.is_floating_point()]
    found = []
    for device in {local.device for _, local in held}:
        here = [(name, local) for name, local in held if local.device == device]
        largest = torch._foreach_norm([local for _, local in here], math.inf)
        finite = torch.stack([value.double() for value in largest]).isfinite().tolist()
        found += [name for (name, _), fine in zip(here, finite, strict=True) if not fine]
    return sorted(found)


def assert_finite(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World | None = None, step: int = 0
) -> None:
    """Raise on every rank, with the tensors' names, unless weights and moments of all ranks are numbers."""
    world = world or World()
    found = nonfinite_tensors(model, optimizer)
    if not int(world.sum(torch.tensor([len(found)]))):
        return
    everyone = world.exchange(
        {"rank": world.rank, "host": socket.gethostname(), "count": len(found), "some": found[:3]}
    )
    guilty = [one for one in everyone if one["count"]]
    first = guilty[0]
    others = f" and {first['count'] - len(first['some'])} more" if first["count"] > len(first["some"]) else ""
    ranks = ", ".join(str(one["rank"]) for one in guilty)
    raise NonFiniteState(
        f"step {step}: the state is not saved, since it holds values that are no numbers: "
        f"{', '.join(first['some'])}{others} on rank {first['rank']} of {world.size}, {first['host']} "
        f"(in all on rank {ranks}); the earlier checkpoints stay. Lower train.lr, lengthen train.warmup_steps or set "
        "train.grad_clip"
    )
