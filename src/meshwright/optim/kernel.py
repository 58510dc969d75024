"""AdamW's update on a GPU, many parts in one launch: all that `reference.py` does, bit for bit.

A launch works on tiles of a few blocks each. Tables on the device say which tile belongs to which part, where the part
and its state lie, and where it lies in the whole parameter. Tiles at the end of a part, which are not full, have a
launch of their own: bounds would keep the others from loads of 16 bytes. Of the tables, only addresses may change from
step to step; they are sent when they have, from pinned memory, so that the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.optim.codes import BLOCK, FIRST_MOMENT, MANTISSA, SECOND_MOMENT, SMALLEST_SCALE
from meshwright.optim.random_rounding import FIRST, GOLDEN, SECOND, THIRD
from meshwright.optim.reference import Rates, Slot

ROWS = 8
"""Blocks of a tile."""
WARPS = 4

_A, _B, _C, _G = (tl.constexpr(number & 0xFFFFFFFF) for number in (FIRST, SECOND, THIRD, GOLDEN))
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _A
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(begin, inside, places, words, step, CUT: tl.constexpr):
    low = tl.load(words).to(tl.uint32, bitcast=True)
    high = tl.load(words + 1).to(tl.uint32, bitcast=True)
    first = _mix(_mix(step.to(tl.uint32) * _G + low) + high)
    second = _mix(first + _G)
    if CUT:
        run = tl.load(places + 3)
        index = begin + inside
        index = tl.load(places + 2) + index // run * tl.load(places + 4) + index % run
        x = (index & 0xFFFFFFFF).to(tl.uint32) ^ (first ^ ((index >> 32).to(tl.uint32) * _G))
    else:
        # In 32 bits: the upper word is that of the first element, or one more.
        begin += tl.load(places + 2)
        start = (begin & 0xFFFFFFFF).to(tl.uint32)
        upper = (begin >> 32).to(tl.uint32)
        index = start + inside.to(tl.uint32)
        x = index ^ tl.where(index < start, first ^ ((upper + 1) * _G), first ^ (upper * _G))
    x = (x ^ (x >> 16)) * _A
    x = ((x ^ (x >> 15)) + second) * _B
    return x ^ (x >> 16)


@triton.jit
def _more_bits(bits):
    x = bits * _C
    return (x ^ (x >> 15)) >> 16


@triton.jit
def _to_bf16(x, bits):
    raised = (x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(x != x, x, raised.to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _decode(codes, scales, SIGNED: tl.constexpr, EXPONENTS: tl.constexpr, M: tl.constexpr):
    magnitude = codes.to(tl.int32)
    if SIGNED:
        magnitude = magnitude & 0x7F
    normal = ((magnitude << (23 - M)) + ((127 - EXPONENTS) << 23)).to(tl.float32, bitcast=True)
    y = tl.where(magnitude < (1 << M), magnitude.to(tl.float32) * (2.0 ** (1 - EXPONENTS - M)), normal)
    if SIGNED:
        y = tl.where(codes.to(tl.int32) >= 0x80, -y, y)
    return y * scales[:, None]


@triton.jit
def _encode(x, bits, SIGNED: tl.constexpr, EXPONENTS: tl.constexpr, M: tl.constexpr):
    size = tl.where(x != x, float("inf"), tl.abs(x))
    scales = tl.max(size, axis=1)
    scales = tl.where(scales < _SMALLEST, 0.0, scales)
    inverse = tl.where(scales > 0, tl.div_rn(1.0, scales), 0.0)[:, None]
    y = tl.where(size >= scales[:, None], tl.where(scales > 0, 1.0, 0.0)[:, None], size * inverse)
    drawn = bits.to(tl.int32)
    raised = y.to(tl.int32, bitcast=True) + ((drawn << (7 - M)) + (1 << (6 - M)))
    normal = (raised >> (23 - M)) - ((127 - EXPONENTS) << M)
    small = (y * (2.0 ** (EXPONENTS - 1 + M)) + drawn.to(tl.float32) * (2.0**-16)).to(tl.int32)
    codes = tl.where(y < 2.0 ** (1 - EXPONENTS), small, normal)
    if SIGNED:
        codes = codes | ((x < 0).to(tl.int32) << 7)
    else:
        codes = tl.where((x > 0) & (y > 0), tl.maximum(codes, 1), codes)
    return codes.to(tl.uint8), scales


@triton.jit
def _pointers(addresses, number: tl.constexpr, kind: tl.constexpr, start, inside, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + number).to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + inside


@triton.jit
def _update(
    tiles,
    addresses,
    places,
    words,
    steps,
    corrections,
    inverse_scale,
    skip,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    weight_type: tl.constexpr,
    gradient_type: tl.constexpr,
    moment_type: tl.constexpr,
    COPIES: tl.constexpr,
    CUT: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_EXPONENTS: tl.constexpr,
    SECOND_EXPONENTS: tl.constexpr,
    M: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 (Triton evaluates both sides of `and`)
        if tl.load(skip) != 0:
            return
    tile = tl.program_id(0)
    number = tl.load(tiles + 2 * tile)
    start = tl.load(tiles + 2 * tile + 1).to(tl.int64) * (ROWS * BLOCK)
    start = tl.multiple_of(start, 16)
    addresses += 7 * number
    words += 2 * number
    places += 5 * number
    counted = tl.load(places + 1)
    rows = tl.arange(0, ROWS)
    inside = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    left = tl.load(places) - start
    if FULL:
        there = None
        blocks_there = None
    else:
        there = inside < left
        blocks_there = rows * BLOCK < left
    weights = _pointers(addresses, 0, weight_type, start, inside, ALIGNED)
    gradients = _pointers(addresses, 1, gradient_type, start, inside, ALIGNED)
    firsts = _pointers(addresses, 2, moment_type, start, inside, ALIGNED)
    seconds = _pointers(addresses, 3, moment_type, start, inside, ALIGNED)
    other = None if FULL else 0
    w = tl.load(weights, mask=there, other=other).to(tl.float32)
    g = tl.load(gradients, mask=there, other=other).to(tl.float32)
    m = tl.load(firsts, mask=there, other=other)
    v = tl.load(seconds, mask=there, other=other)
    if moment_type == tl.uint8:
        block = start // BLOCK + rows
        first_scales = tl.load(addresses + 4).to(tl.pointer_type(tl.float32)) + block
        second_scales = tl.load(addresses + 5).to(tl.pointer_type(tl.float32)) + block
        m = _decode(m, tl.load(first_scales, mask=blocks_there, other=other), True, FIRST_EXPONENTS, M)
        v = _decode(v, tl.load(second_scales, mask=blocks_there, other=other), False, SECOND_EXPONENTS, M)
    else:
        m = m.to(tl.float32)
        v = v.to(tl.float32)
    if inverse_scale is not None:
        g = g * tl.load(inverse_scale)
    rate = tl.load(corrections + 2 * counted)
    root = tl.load(corrections + 2 * counted + 1)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    w = w * decay - tl.div_rn(m * rate, tl.sqrt_rn(v) * root + eps)
    if weight_type == tl.bfloat16 or moment_type != tl.float32:
        bits = _random_bits(start, inside, places, words, tl.load(steps + counted).to(tl.int32), CUT)
    if weight_type == tl.bfloat16:
        tl.store(weights, _to_bf16(w, bits), mask=there)
    else:
        tl.store(weights, w, mask=there)
    if COPIES:
        copies = _pointers(addresses, 6, tl.bfloat16, start, inside, ALIGNED)
        tl.store(copies, w.to(tl.bfloat16), mask=there)
    if moment_type == tl.uint8:
        m, scale = _encode(m, bits >> 16, True, FIRST_EXPONENTS, M)
        tl.store(first_scales, scale, mask=blocks_there)
        v, scale = _encode(v, _more_bits(bits), False, SECOND_EXPONENTS, M)
        tl.store(second_scales, scale, mask=blocks_there)
    elif moment_type == tl.bfloat16:
        m = _to_bf16(m, bits >> 16)
        v = _to_bf16(v, _more_bits(bits))
    tl.store(firsts, m, mask=there)
    tl.store(seconds, v, mask=there)


class Updates:
    """Launches of updates; keeps the tables of those parts that it has seen together."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Tables] = {}

    def __call__(
        self,
        slots: list[Slot],
        rates: Rates,
        steps: Tensor,
        corrections: Tensor,
        inverse_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Update all slots, which lie on one device; see `reference.update`."""
        alike: dict[Any, list[int]] = {}
        for number, slot in enumerate(slots):
            slot.gradient = slot.gradient.contiguous()
            alike.setdefault(_kind(slot), []).append(number)
        for kind, numbers in alike.items():
            own = {number: slots[number] for number in numbers}
            key = (kind, tuple((number, slot.place, slot.part.numel()) for number, slot in own.items()))
            if key not in self._tables:
                self._tables[key] = _Tables(own)
            self._tables[key].launch(list(own.values()), rates, steps, corrections, inverse_scale, skip)


def _kind(slot: Slot) -> Any:
    """What a launch has in common."""
    tensors = (slot.part, slot.gradient, slot.first, slot.second, slot.copy)
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
    dtypes = (slot.part.dtype, slot.gradient.dtype, slot.first.dtype)
    return (*dtypes, slot.copy is not None, bool(slot.place.run), aligned)


class _Tables:
    """What a launch knows of its parts."""

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        """By their numbers among the counts of steps."""
        parts = list(slots.values())
        device, tile = parts[0].part.device, ROWS * BLOCK
        sizes = [slot.part.numel() for slot in parts]
        counts = torch.tensor([size // tile for size in sizes])
        number = torch.repeat_interleave(torch.arange(len(parts)), counts)
        within = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]
        self.full = _sent(torch.stack((number, within), dim=1).int(), device)
        ends = [(index, size // tile) for index, size in enumerate(sizes) if size % tile]
        self.ends = _sent(torch.tensor(ends, dtype=torch.int32).reshape(-1, 2), device)
        places = [(slot.part.numel(), number, *astuple(slot.place)[1:]) for number, slot in slots.items()]
        self.places = _sent(torch.tensor(places, dtype=torch.int64), device)
        self.words = _sent(torch.tensor([slot.place.words for slot in parts], dtype=torch.int32), device)
        self._sent: list[list[int]] = []
        self._addresses = self.words

    def launch(
        self,
        slots: list[Slot],
        rates: Rates,
        steps: Tensor,
        corrections: Tensor,
        inverse_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Update these parts."""
        addresses = [_addresses(slot) for slot in slots]
        if addresses != self._sent:
            self._addresses, self._sent = _sent(torch.tensor(addresses, dtype=torch.int64), steps.device), addresses
        one = slots[0]
        *dtypes, copies, cut, aligned = _kind(one)
        weight, gradient, moment = (_TYPES[dtype] for dtype in dtypes)
        for tiles, full in ((self.full, True), (self.ends, False)):
            if len(tiles):
                _update[(len(tiles),)](
                    tiles,
                    self._addresses,
                    self.places,
                    self.words,
                    steps,
                    corrections,
                    inverse_scale,
                    None if skip is None else skip.view(torch.uint8),
                    rates.decay,
                    rates.beta1,
                    1 - rates.beta1,
                    rates.beta2,
                    1 - rates.beta2,
                    rates.eps,
                    weight_type=weight,
                    gradient_type=gradient,
                    moment_type=moment,
                    COPIES=copies,
                    CUT=cut,
                    FULL=full,
                    ALIGNED=aligned,
                    ROWS=ROWS,
                    BLOCK=BLOCK,
                    FIRST_EXPONENTS=FIRST_MOMENT.exponents,
                    SECOND_EXPONENTS=SECOND_MOMENT.exponents,
                    M=MANTISSA,
                    num_warps=WARPS,
                    # Products and sums are rounded one by one, as in the reference.
                    enable_fp_fusion=False,
                )


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """A table on the device; the host does not wait until it is there."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


def _addresses(slot: Slot) -> list[int]:
    tensors = (slot.part, slot.gradient, slot.first, slot.second, slot.first_scales, slot.second_scales, slot.copy)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
