"""Orders of axes: what is one, how it is written, and which ranks come to lie where."""

from __future__ import annotations

import re
from itertools import product

import pytest

from meshwright.axis_order import AXES, is_plain, orders, parse_order, ranks_in_mesh_order, short, strides
from meshwright.errors import ConfigError
from meshwright.estimate.units import Place
from meshwright.strategy import Strategy


def strategies() -> list[Strategy]:
    """All ways to split by 1, 2 or 3 along each axis."""
    return [Strategy(**dict(zip(AXES, sizes, strict=True)), zero=3) for sizes in product((1, 2, 3), repeat=5)]


def test_ranks_ascend_along_every_axis_in_every_order() -> None:
    for strategy in strategies():
        for order in orders(strategy):
            ranks = ranks_in_mesh_order(order, strategy)
            assert sorted(ranks) == list(range(strategy.world))
            places = [Place.of(strategy, rank, order) for rank in range(strategy.world)]
            for slot, rank in enumerate(ranks):
                # The mesh's own place of that slot is the place of the rank.
                assert places[rank] == Place.of(strategy, slot)
            for made in (("replicate", "shard", "cp"), ("shard", "cp"), *((axis,) for axis in AXES)):
                groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
                for place in places:
                    others = tuple(getattr(place, axis) for axis in AXES if axis not in made)
                    groups.setdefault(others, []).append(tuple(getattr(place, axis) for axis in made))
                assert all(group == sorted(group) for group in groups.values()), (strategy, order, made)


def test_twenty_orders_keep_who_belongs_together() -> None:
    strategy = Strategy(pp=2, replicate=2, shard=2, cp=2, tp=2, zero=3)
    found = orders(strategy)
    assert len(found) == len(set(found)) == 20
    assert found[0] == AXES
    assert len(orders(Strategy(replicate=2, tp=2))) == 2


def test_an_order_is_written_as_it_is_read() -> None:
    for strategy in strategies():
        for order in orders(strategy):
            again = parse_order(short(order, strategy), strategy)
            assert ranks_in_mesh_order(again, strategy) == ranks_in_mesh_order(order, strategy)
    assert is_plain(parse_order("auto", Strategy(tp=2)), Strategy(tp=2))


def test_the_last_axis_is_on_neighbours() -> None:
    strategy = Strategy(pp=2, replicate=3, tp=4)
    assert strides(parse_order("pp,dp,tp", strategy), strategy)["tp"] == 1
    found = strides(parse_order("tp,pp,dp", strategy), strategy)
    assert (found["tp"], found["pp"], found["replicate"]) == (6, 3, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp,tq", "unknown axis 'tq'; write auto, in-order, or axes such as pp,dp,cp,tp"),
        ("dp,tp,dp", "replicate is there twice"),
        ("dp,shard,tp", "shard is there twice"),
        ("dp", "tp=2 of 'dp=4 zero=3 replicate=2 tp=2' is not in it; add tp"),
        ("shard,replicate,tp", "replicate, shard and cp stay in this order"),
        ("", "unknown axis ''"),
    ],
)
def test_what_is_no_order_is_refused_with_what_to_do(text: str, why: str) -> None:
    strategy = Strategy.parse("dp=4 zero=3 replicate=2 tp=2", 8)
    with pytest.raises(ConfigError, match=rf"parallel\.placement='{re.escape(text)}'.*{re.escape(why)}"):
        parse_order(text, strategy)
