"""Which entries of one device's tensor a rank holds, found from the shapes and the rank's place.

A rank holds some samples (dp), some tokens of each (cp, and between regions sp), some heads or columns (tp). What says
where it lies, as a DTensor does, is believed.
"""

from __future__ import annotations

from math import prod

import numpy as np

from meshwright.context_layout import ContextLayout
from meshwright.cuts import part
from meshwright.verify.record import Array, Part, Place, StepTrace

Index = tuple[tuple[int, ...] | None, ...]
"""Which entries of each dimension; None for all of them."""


def cut(whole: Array, held: Part) -> Array:
    """The part of a whole that lies where some part lies."""
    if whole.ndim == len(held.whole) - 1 and whole.size == prod(held.whole):
        # A packed dimension is seen as two.
        whole = whole.reshape(held.whole)
    if whole.shape != held.whole:
        return np.empty(0)
    places = zip(held.offset, held.values.shape, strict=True)
    return whole[tuple(slice(first, first + length) for first, length in places)]


def take(whole: Array, index: Index) -> Array:
    """Those entries of a whole."""
    for dimension, entries in enumerate(index):
        if entries is not None:
            whole = np.take(whole, entries, axis=dimension)
    return whole


def index_of(whole: tuple[int, ...], held: Part, place: Place, tokens: Array | None, by_columns: bool) -> Index | None:
    """Which entries of one device's tensor a rank holds; None where that does not follow from its shape."""
    shape = held.values.shape
    shares = place.shares or (1,) * place.dp
    parts, own = sum(shares), shares[place.data_rank]
    if len(shape) != len(whole) or (shape[0] != whole[0] and shape[0] * parts != whole[0] * own):
        return None
    index: list[tuple[int, ...] | None] = [None] * len(whole)
    # What does not depend on the samples, such as an embedding of positions, is the same on all data ranks.
    if shape[0] != whole[0]:
        first = sum(shares[: place.data_rank]) * (shape[0] // own)
        index[0] = tuple(range(first, first + shape[0]))
    for dimension in range(1, len(whole)):
        length, full = shape[dimension], whole[dimension]
        if held.whole != shape and held.whole[dimension] == full:
            # It knows its own place.
            index[dimension] = tuple(range(held.offset[dimension], held.offset[dimension] + length))
        elif length != full:
            entries = None
            if dimension == 1 and place.cp > 1 and tokens is not None:
                entries = _own_tokens(tokens, length, place)
            elif dimension == 1 and place.cp == 1 and not by_columns:
                entries = _own_tokens(np.arange(full), length, place)
            if entries is None and by_columns:
                entries = _own_columns(full, length, place)
            if entries is None:
                return None
            index[dimension] = entries
    return tuple(index)


def _own_tokens(tokens: Array, length: int, place: Place) -> tuple[int, ...] | None:
    """The tokens of a rank: those of its share of the sequence, or its own among the tp ranks of these."""
    if length == len(tokens):
        return tuple(tokens.tolist())
    if length * place.tp == len(tokens):
        return tuple(tokens[place.tp_rank * length :][:length].tolist())
    return None


def _own_columns(full: int, length: int, place: Place) -> tuple[int, ...] | None:
    """The columns or heads of a rank: one part for each, or several ranks with the same one."""
    own = part(full, place.tp, place.tp_rank)
    if own.stop - own.start != length:
        if full % length:
            return None
        heads = full // length
        first = place.tp_rank * heads // place.tp * length
        own = slice(first, first + length)
    return tuple(range(own.start, own.stop))


def tokens_of(expected: StepTrace, trace: StepTrace) -> Array | None:
    """Which tokens of its sequences a rank of several (cp) has; None where it has all of them."""
    place = trace.place
    if place.cp == 1:
        return None
    return np.array(ContextLayout.of(place.cp, place.cp_method).positions(expected.length, place.cp_rank))
