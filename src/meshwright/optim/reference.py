"""AdamW's update of one part in plain torch: what the CPU runs, and what the GPU's kernel is compared with.

Sums and products are written one by one: torch's combined operations may leave out a rounding that the kernel has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.optim.codes import BLOCK, FIRST_MOMENT, PIECE, SECOND_MOMENT, Code, blocks_of, decode, encode
from meshwright.optim.random_rounding import Place, high_half, more_bits, random_bits, round_to_bf16


@dataclass(frozen=True)
class Rates:
    """What an update is computed with, alike for all parts of a group."""

    decay: float
    """By which weights are multiplied."""
    beta1: float
    beta2: float
    eps: float


@dataclass
class Slot:
    """A part of a parameter with all that its update reads and writes; scales where moments are codes."""

    part: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    first_scales: Tensor | None
    second_scales: Tensor | None
    place: Place
    copy: Tensor | None = None
    """Gets the new weight in bfloat16, rounded to the nearest."""


def update(
    slot: Slot, rates: Rates, step: Tensor, corrections: Tensor, inverse_scale: Tensor | None, skip: Tensor | None
) -> None:
    """Update a part and its moments in place.

    `step` counts this update; `corrections` are the learning rate over that of the mean's bias, and one over the root
    of that of the squares' bias. Gradients are multiplied by `inverse_scale`; where `skip` is true nothing is changed.
    """
    part, gradient = slot.part.view(-1), slot.gradient.reshape(-1)
    rate, root = corrections.unbind()
    random = part.dtype == torch.bfloat16 or slot.first.dtype != torch.float32
    for start in range(0, part.numel(), PIECE):
        stop = min(start + PIECE, part.numel())
        here, blocks = slice(start, stop), slice(start // BLOCK, blocks_of(stop))
        first, second = (moment.view(-1)[here] for moment in (slot.first, slot.second))
        scales = [None if held is None else held[blocks] for held in (slot.first_scales, slot.second_scales)]
        g = gradient[here].float()
        if inverse_scale is not None:
            g = g * inverse_scale
        m = _read(FIRST_MOMENT, first, scales[0]) * rates.beta1 + g * (1 - rates.beta1)
        v = _read(SECOND_MOMENT, second, scales[1]) * rates.beta2 + (g * g) * (1 - rates.beta2)
        # Torch's square root of float32 may be off by a bit; that of float64, rounded, is not.
        w = part[here].float() * rates.decay - (m * rate) / (v.double().sqrt().float() * root + rates.eps)
        bits = random_bits(slot.place, step, start, stop) if random else None
        if slot.copy is not None:
            _write(slot.copy.view(-1)[here], w.to(torch.bfloat16), skip)
        if bits is not None and part.dtype == torch.bfloat16:
            w = round_to_bf16(w, bits)
        _write(part[here], w, skip)
        _keep(FIRST_MOMENT, first, scales[0], m, None if bits is None else high_half(bits), skip)
        _keep(SECOND_MOMENT, second, scales[1], v, None if bits is None else more_bits(bits), skip)


def _read(code: Code, kept: Tensor, scales: Tensor | None) -> Tensor:
    return kept.float() if scales is None else decode(code, kept, scales)


def _keep(
    code: Code, kept: Tensor, scales: Tensor | None, value: Tensor, bits: Tensor | None, skip: Tensor | None
) -> None:
    if scales is not None:
        value, scale = encode(code, value, bits)
        _write(scales, scale, skip)
    elif bits is not None and kept.dtype == torch.bfloat16:
        value = round_to_bf16(value, bits)
    _write(kept, value, skip)


def _write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    # A choice by value, not by control flow: nobody waits for the device.
    target.copy_(value if skip is None else torch.where(skip, target, value))
