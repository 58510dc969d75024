"""The GPU's AdamW beside the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.parts import Box
from meshwright.optim import reference
from meshwright.optim.adamw import FusedAdamW

SHAPES = [(40, 130), (3, 70), (64,), (4096,), (2, 5, 33)]
ON_GPU = torch.cuda.is_available()


def optimizers(dtype: torch.dtype, moments: Any) -> list[FusedAdamW]:
    """One for the reference and one for the kernel, with parts that are cut, far from the start, and at odd places."""
    found = []
    for device in ("cpu", "cuda" if ON_GPU else "cpu"):
        draw = torch.Generator().manual_seed(1)
        parts = [nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in SHAPES]
        parts.append(nn.Parameter(torch.randn(4099, generator=draw).to(device, dtype)[1:]))
        optimizer = FusedAdamW(parts, lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1, moments=moments)
        optimizer.place(parts[1], "cut", Box(parts[1], (10, 50), (40, 200)))
        optimizer.place(parts[3], "far", Box(parts[3], ((1 << 32) - 1111,), (1 << 33,)))
        optimizer.place(parts[4], "experts", Box(parts[4], (1, 0, 33), (4, 5, 66)))
        found.append(optimizer)
    return found


def by_kernel(slot: Any, rates: Any, step: Tensor, corrections: Tensor, *told: Any) -> None:
    from meshwright.optim.kernel import Updates

    Updates()([slot], rates, step[None], corrections[None], *told)


def compare(dtype: torch.dtype, moments: str) -> None:
    """Raise unless five steps of both, one of them skipped, are the same in every byte."""
    one, other = sides = optimizers(dtype, moments)
    plain = reference.update
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        for number, shape in enumerate([*SHAPES, (4098,)]):
            gradient = torch.randn(shape, generator=draw) * torch.exp(3 * torch.randn(shape, generator=draw))
            for side in sides:
                part = side.param_groups[0]["params"][number]
                part.grad = gradient.to(part.device, dtype)
        for side in sides:
            device = side.param_groups[0]["params"][0].device
            side.grad_scale, side.found_inf = (  # type: ignore[attr-defined]
                torch.tensor([value], device=device) for value in (1.7, float(step == 2))
            )
            reference.update = by_kernel if side is other and not ON_GPU else plain
            try:
                side.step()
            finally:
                reference.update = plain
        for mine, theirs in zip(*(side.param_groups[0]["params"] for side in sides), strict=True):
            assert torch.equal(mine.detach(), theirs.detach().cpu()), (step, mine.shape)
            for kind, value in one.state[mine].items():
                assert torch.equal(value, other.state[theirs][kind].cpu()), (step, mine.shape, kind)
