"""What faults on purpose do to the numbers of a step; tests ask for them (see `faults`), nothing else does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.models.parts import local_of


def factor_of_loss(kind: str | None) -> float | None:
    """By how much a fault in the forward pass multiplies the loss: `nan`, `inf`, `spike:10`."""
    name, _, amount = (kind or "").partition(":")
    return {"nan": math.nan, "inf": math.inf, "spike": float(amount or 10)}.get(name)


@torch.no_grad()
def spoil_gradient(parameters: Iterable[Tensor], kind: str | None) -> None:
    """After the gradients are summed: one entry on this rank is no number (`nan`, `inf`) or another one (`wrong`)."""
    if kind not in ("nan", "inf", "wrong"):
        return
    held = (local_of(parameter.grad) for parameter in parameters if parameter.grad is not None)
    entry = next(gradient for gradient in held if gradient.numel()).view(-1)[0]
    entry.copy_(entry + 1e-3 if kind == "wrong" else torch.tensor(float(kind)))


@torch.no_grad()
def flip_bit(named: Iterable[tuple[str, Tensor]], kind: str | None) -> None:
    """`bitflip` or `bitflip:NAME`: one bit of this rank's copy of a parameter changes, as a bad chip would do it."""
    wanted, _, name = (kind or "").partition(":")
    if wanted != "bitflip":
        return
    for found, parameter in named:
        local = local_of(parameter.detach())
        if local.numel() and name in found:
            whole_numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
            # In the middle of the mantissa: no error that anybody would see.
            local.view(-1)[:1].view(whole_numbers).bitwise_xor_(1 << (4 * local.element_size()) // 2)
            return
    raise ValueError(f"no parameter {name!r} to flip a bit of on this rank")


def use_too_much(kind: str | None, device: torch.device) -> None:
    """`oom`: ask for more memory than any machine has."""
    if kind == "oom":
        torch.empty(2**50, dtype=torch.uint8, device=device)
