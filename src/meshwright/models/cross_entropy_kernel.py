"""Cross-entropy and its gradient on a GPU: one program reads a row of logits and writes the gradient in its place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_IGNORED = tl.constexpr(-100)


@triton.jit
def _row(
    logits,
    stride,
    targets,
    factor,
    losses,
    entries,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    if target == _IGNORED:
        tl.store(losses + row, 0.0)
        if LEARNS:
            for start in range(0, entries, BLOCK):
                zeros = tl.zeros((BLOCK,), logits.dtype.element_ty)
                tl.store(logits + start + column, zeros, mask=start + column < entries)
        return
    # Before anything is overwritten.
    wanted = tl.load(logits + target).to(tl.float32)
    largest = tl.full((BLOCK,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < entries, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, x)
        total = total * tl.exp(largest - new) + tl.exp(x - new)
        largest = new
    highest = tl.max(largest, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(largest - highest), axis=0))
    tl.store(losses + row, log_sum - wanted)
    if LEARNS:
        scale = tl.load(factor).to(tl.float32)
        for start in range(0, entries, BLOCK):
            place = start + column
            x = tl.load(logits + place, mask=place < entries, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(x - log_sum) - tl.where(place == target, 1.0, 0.0)) * scale
            tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=place < entries)


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by == 1.0:
        return
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(values + place, mask=place < count)
    tl.store(values + place, (held.to(tl.float32) * by).to(values.dtype.element_ty), mask=place < count)


def losses_and_gradient_(
    logits_NV: Tensor, targets_N: Tensor, factor: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The cross-entropy of each target, and in the place of the logits the gradient of their sum times the factor."""
    rows, entries = logits_NV.shape
    assert logits_NV.stride(1) == 1
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    with torch.cuda.device(logits_NV.device):
        _row[(rows,)](
            logits_NV,
            logits_NV.stride(0),
            targets_N.contiguous(),
            factor,
            losses_N,
            entries,
            LEARNS=learns,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return losses_N, logits_NV if learns else None


def scale_(values: Tensor, factor: Tensor) -> None:
    """Multiply in place; costs nothing where the factor is one."""
    assert values.is_contiguous()
    with torch.cuda.device(values.device):
        _scale[(triton.cdiv(values.numel(), _BLOCK),)](values, factor, values.numel(), BLOCK=_BLOCK, num_warps=8)
