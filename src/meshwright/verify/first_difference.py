"""Where a step under a strategy first departs from the same step on one device: the module, or the parameter.

The search goes the way of the step and stops at the first thing that departs:

1. outputs of modules, in the order in which they end, if the loss departs;
2. gradients of these outputs, in reverse, if a parameter's gradient departs;
3. gradients of parameters, after all sums over ranks;
4. their norm;
5. weights after the update.

A rank holds a part of an output: its samples (dp), its tokens (cp, and between regions sp), its heads or columns (tp).
The part is compared with the same part of the whole that one device has. Where each rank holds a summand, the sum is
compared:

    module                          its output                  the gradient of its output
    outside of regions, a region    all of it, or its tokens    the same
    inside: column, heads, shared   a part, or all of it        summed over the ranks that hold the same
    inside: row                     a summand                   all of it
    head                            a part that knows its place the same

What cannot be made whole is passed over: experts' rows, which are sorted by expert and so lie elsewhere on every split,
and modules inside a region that the table does not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.verify.layout import Index, cut, index_of, take, tokens_of
from meshwright.verify.record import Array, Call, Part, StepTrace

Kind = Literal["output", "output gradient", "loss", "parameter gradient", "gradient norm", "update"]

SMALLEST = 1e-3
"""What is this much smaller than the largest of its kind counts as if it were not: it may be rounding alone."""
_CUT = ("column", "heads", "shared")
"""Rules inside a region under which a rank has a part of the output, or uses it for a part of what follows."""


@dataclass(frozen=True)
class Difference:
    """The first thing of a step that departs."""

    kind: Kind
    name: str
    step: int
    difference: float
    """The largest difference of an element, relative to the largest of the tensor."""
    micro_step: int | None = None
    rank: int | None = None
    rule: str = ""
    after: str = ""
    """What was compared just before, and agreed."""
    factor: float | None = None
    """By what it is multiplied, if it is a multiple of what it should be."""
    everywhere: bool = False
    """Whether the gradients of all parameters have this factor."""


@dataclass(frozen=True)
class _Departure:
    relative: float
    rank: int | None
    """None for a sum over ranks."""
    factor: float | None


def first_difference(
    step: int, expected: StepTrace, found: Sequence[StepTrace], bound: float, *, loss_departs: bool
) -> Difference | None:
    """Where the outputs or gradients of a step first depart; None where all that can be compared agrees."""
    search = Search(expected, found, bound)
    if loss_departs:
        calls = list(expected.outputs)
        difference = search.outputs(step, "output", calls, 1.0)
        if difference is not None:
            return difference
    gradient = search.parameters(step)
    if gradient is None:
        return None
    calls = [call for call in reversed(expected.outputs) if call in expected.gradients]
    # The micro-steps go backward one after the other.
    calls.sort(key=lambda call: call.micro_step)
    return search.outputs(step, "output gradient", calls, search.loss_factor(calls)) or gradient


def unlike(
    expected: dict[str, Part], found: Sequence[dict[str, Part]], floor: float
) -> Iterator[tuple[str, float, int | None, float | None]]:
    """(name, relative difference, rank, factor) of every tensor that is held in parts; differences below `floor` of
    the largest number are relative to that floor."""
    for name, whole in expected.items():
        holders = [(rank, parts[name]) for rank, parts in enumerate(found) if name in parts]
        if not holders:
            yield name, float("inf"), None, None
            continue
        scale = max(_largest([whole.values]), floor)
        worst = max((_unlike(cut(whole.values, held), held.values, scale, rank) for rank, held in holders), key=_order)
        yield name, worst.relative, worst.rank, worst.factor


class Search:
    """Compares what ranks recorded of a step with what one device recorded of it."""

    def __init__(self, expected: StepTrace, found: Sequence[StepTrace], bound: float) -> None:
        self.expected = expected
        self.found = found
        self.bound = bound
        self.tokens = [tokens_of(expected, trace) for trace in found]

    def outputs(self, step: int, kind: Kind, calls: Iterable[Call], factor: float) -> Difference | None:
        """The first of some calls whose output, or its gradient, departs."""
        calls = list(calls)
        wholes = self._of(self.expected, kind)
        floor = SMALLEST * _largest([wholes[call].values for call in calls])
        # Gradients begin with the loss, which the head computes together with its own.
        agreed = "the loss" if kind == "output gradient" else ""
        for place, call in enumerate(calls):
            departure = self.departure(kind, call, floor, factor)
            if departure is None:
                continue
            if not departure.relative <= self.bound:
                call = self._innermost(wholes, calls[place:])
                rule = self.expected.rules.get(call.module, "")
                return Difference(
                    kind,
                    call.module or "the model",
                    step,
                    departure.relative,
                    call.micro_step,
                    departure.rank,
                    rule,
                    agreed,
                    departure.factor,
                )
            agreed = call.module or "the model"
        return None

    def parameters(self, step: int) -> Difference | None:
        """The first gradient of a parameter, from the end of the model, that departs."""
        wholes = self.expected.parameter_gradients
        floor = SMALLEST * _largest([whole.values for whole in wholes.values()])
        held = [trace.parameter_gradients for trace in self.found]
        compared = list(unlike(wholes, held, floor))
        departing = [entry for entry in compared if not entry[1] <= self.bound]
        if not departing:
            return None
        name, relative, rank, factor = departing[-1]
        # A wrong divisor is the same for all parameters; those without a gradient tell nothing.
        factors = [other for *_, other in departing]
        everywhere = factor is not None and all(other is not None and abs(other - factor) < 1e-6 for other in factors)
        everywhere = everywhere and all(
            entry in departing or not _largest([wholes[entry[0]].values]) for entry in compared
        )
        rule = self.expected.rules.get(name.rpartition(".")[0], "")
        return Difference(
            "parameter gradient", name, step, relative, rank=rank, rule=rule, factor=factor, everywhere=everywhere
        )

    def loss_factor(self, calls: Sequence[Call]) -> float:
        """By what gradients are multiplied before the sum over ranks: dp x cp, where that sum is an average."""
        ranks = self.found[0].place.dp * self.found[0].place.cp
        for call in calls:
            departures = {
                factor: self.departure("output gradient", call, 0.0, factor) for factor in (1.0, float(ranks))
            }
            for factor, departure in departures.items():
                if departure is not None and departure.relative <= self.bound:
                    return factor
            if None not in departures.values():
                break
        return 1.0

    def _innermost(self, wholes: dict[Call, Part], calls: list[Call]) -> Call:
        """The module inside the first one which gave this very tensor, if there is one."""
        chosen = calls[0]
        for call in calls[1:]:
            above = f"{chosen.module}." if chosen.module else ""
            inside = call.micro_step == chosen.micro_step and call.module.startswith(above)
            if not inside or not np.array_equal(wholes[call].values, wholes[chosen].values):
                break
            chosen = call
        return chosen

    def _of(self, trace: StepTrace, kind: Kind) -> dict[Call, Part]:
        return trace.outputs if kind == "output" else trace.gradients

    def departure(self, kind: Kind, call: Call, floor: float, factor: float) -> _Departure | None:
        """How far the ranks are from one device; None where the whole cannot be had."""
        rule = self.expected.rules.get(call.module, "")
        inside = call.module in self.expected.within
        if rule == "experts" or (inside and not rule):
            return None
        whole = self._of(self.expected, kind)[call].values
        scale = max(_largest([whole]), floor)
        summed = inside and (rule == "row" if kind == "output" else rule in _CUT)
        sums: dict[Index, Array] = {}
        worst: _Departure | None = None
        for rank, trace in enumerate(self.found):
            held = self._of(trace, kind).get(call)
            if held is None:
                continue
            index = index_of(whole.shape, held, trace.place, self.tokens[rank], inside and rule in _CUT)
            without_samples = trace.place.dp > 1 and held.values.shape[0] == len(whole)
            if index is None or (without_samples and kind == "output gradient"):
                return None
            if summed:
                sums[index] = sums[index] + held.values if index in sums else held.values
                continue
            worst = max(worst, _unlike(take(whole, index) * factor, held.values, scale * factor, rank), key=_order)
        for index, values in sums.items():
            worst = max(worst, _unlike(take(whole, index) * factor, values, scale * factor, None), key=_order)
        return worst


def _order(departure: _Departure | None) -> float:
    return -1.0 if departure is None else departure.relative


def _unlike(whole: Array, held: Array, scale: float, rank: int | None) -> _Departure:
    if whole.shape != held.shape:
        return _Departure(float("inf"), rank, None)
    if not whole.size:
        return _Departure(0.0, rank, None)
    relative = float(np.abs(held - whole).max()) / (scale or 1.0)
    if np.isnan(relative):
        return _Departure(float("inf"), rank, None)
    square = float((whole * whole).sum())
    factor = float((held * whole).sum()) / square if square else None
    if factor is not None and (abs(factor - 1) < 1e-3 or float(np.abs(held - factor * whole).max()) > 1e-6 * scale):
        factor = None
    return _Departure(relative, rank, factor)


def _largest(values: Iterable[Array]) -> float:
    return max((float(np.abs(value).max()) for value in values if value.size), default=0.0)
