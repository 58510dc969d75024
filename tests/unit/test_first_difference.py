"""Parts of outputs are compared with the same parts of the whole, whichever way ranks hold them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.verify.first_difference import Difference, first_difference, unlike
from meshwright.verify.record import Array, Call, Part, Place, StepTrace

SAMPLES, TOKENS, WIDTH = 4, 8, 6
CALL = Call(0, "layer", 0)
Cut = Callable[[Array, Place], Array]


def part_of(values: Array) -> Part:
    return Part(values.copy(), (0,) * values.ndim, values.shape)


def traces(places: list[Place], rule: str, cut: Cut) -> tuple[StepTrace, list[StepTrace]]:
    """A step in which one module ran, on one device and on ranks that hold parts of its output."""
    draw = np.random.default_rng(0)
    ids = draw.integers(1000, size=(SAMPLES, TOKENS))
    whole = draw.normal(size=(SAMPLES, TOKENS, WIDTH))
    within = frozenset({"layer"} if rule in ("column", "heads", "row", "unnamed") else ())
    rule = "" if rule == "unnamed" else rule
    expected = StepTrace(Place(), ids.shape[1], {CALL: part_of(whole)}, rules={"layer": rule}, within=within)
    found = []
    for place in places:
        share = SAMPLES // place.dp
        rows = slice(place.data_rank * share, (place.data_rank + 1) * share)
        found.append(StepTrace(place, ids.shape[1], {CALL: part_of(cut(whole[rows], place))}))
    return expected, found


def tokens_of(place: Place) -> list[int]:
    """Each rank has a piece from the beginning and one from the end, so that causal attention is shared evenly."""
    pieces = np.split(np.arange(TOKENS), 2 * place.cp)
    return [*pieces[place.cp_rank], *pieces[-1 - place.cp_rank]] if place.cp > 1 else list(range(TOKENS))


def sequence(values: Array, place: Place) -> Array:
    held = values[:, tokens_of(place)]
    return np.split(held, place.tp, axis=1)[place.tp_rank]


def columns(values: Array, place: Place) -> Array:
    return np.split(values, place.tp, axis=2)[place.tp_rank]


def search(expected: StepTrace, found: list[StepTrace]) -> Difference | None:
    return first_difference(1, expected, found, 1e-9, loss_departs=True)


CP = [Place(cp_rank=rank, cp=2) for rank in range(2)]
CP_TP = [Place(cp_rank=cp, cp=2, tp_rank=tp, tp=2) for cp in range(2) for tp in range(2)]
DP = [Place(data_rank=rank, dp=2) for rank in range(2)]
TP = [Place(tp_rank=rank, tp=2) for rank in range(2)]


@pytest.mark.parametrize(
    ("places", "rule", "cut"),
    [
        (DP, "", lambda values, place: values),
        (CP, "", sequence),
        (CP_TP, "tokens", sequence),
        (TP, "tokens", sequence),
        (TP, "region", lambda values, place: values),
        (TP, "column", columns),
        (TP, "row", lambda values, place: values * (0.3 if place.tp_rank else 0.7)),
        (
            [Place(tp_rank=rank, tp=4) for rank in range(4)],
            "heads",
            lambda v, p: np.split(v, 2, axis=2)[p.tp_rank // 2],
        ),
    ],
)
def test_parts_agree_with_the_whole_and_one_wrong_number_is_found(places: list[Place], rule: str, cut: Cut) -> None:
    expected, found = traces(places, rule, cut)
    assert search(expected, found) is None
    found[-1].outputs[CALL].values[0, -1, -1] += 1e-6
    difference = search(expected, found)
    assert difference is not None
    assert (difference.kind, difference.name, difference.rule) == ("output", "layer", rule)
    assert difference.rank == (None if rule == "row" else len(places) - 1)


def test_tokens_of_another_rank_are_found() -> None:
    expected, found = traces(CP, "", sequence)
    found[0].outputs, found[1].outputs = found[1].outputs, found[0].outputs
    difference = search(expected, found)
    assert difference is not None
    assert difference.name == "layer"


@pytest.mark.parametrize("rule", ["experts", "unnamed"])
def test_what_cannot_be_made_whole_is_passed_over(rule: str) -> None:
    expected, found = traces(TP, rule, lambda values, place: values + 1)
    assert search(expected, found) is None
    expected, found = traces(TP, "", lambda values, place: values[:, :, :3])
    assert search(expected, found) is None


def test_nothing_that_is_no_number_passes() -> None:
    expected, found = traces(DP, "", lambda values, place: values)
    found[1].outputs[CALL].values[0, 0, 0] = np.nan
    assert search(expected, found) is not None


def test_parameter_on_no_rank_is_found() -> None:
    expected, found = traces(DP, "", lambda values, place: values)
    expected.parameter_gradients = {"layer.weight": part_of(np.ones((2, 2)))}
    difference = search(expected, found)
    assert difference is not None
    assert (difference.kind, difference.name) == ("parameter gradient", "layer.weight")


def test_parameters_of_different_ranks_are_compared_as_one_model() -> None:
    """As on the stages of a pipeline, and in parts that know their place."""
    first, last = np.arange(6.0).reshape(3, 2), np.ones((2, 2))
    expected = {"first": part_of(first), "last": part_of(last)}
    found = [
        {"first": Part(first[:2], (0, 0), (3, 2))},
        {"first": Part(first[2:], (2, 0), (3, 2))},
        {"last": part_of(last)},
    ]
    assert [(name, worst) for name, worst, *_ in unlike(expected, found, 1.0)] == [("first", 0.0), ("last", 0.0)]
    found[2]["last"].values[0, 0] += 0.5
    assert [entry[:3] for entry in unlike(expected, found, 1.0)][1] == ("last", 0.5, 2)
