"""What all-reduce algorithms send, and how long they should take, against what is known of them by formula."""

from __future__ import annotations

import pytest

from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.bandwidth import Line
from meshwright.comm.predict import seconds, traffic

LINE = Line(1e-5, 1e9)
SIZE = 64 << 20


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_times_are_those_of_the_formulas(ranks: int) -> None:
    count, wire = SIZE // 4, SIZE / LINE.bandwidth
    power = ranks.bit_length() - 1
    formulas = {
        "ring": 2 * (ranks - 1) * (LINE.latency_s + wire / ranks),
        "halving-doubling": 2 * power * LINE.latency_s + 2 * wire * (ranks - 1) / ranks,
        "tree": 2 * power * (LINE.latency_s + wire),
        "ps": 2 * (LINE.latency_s + (ranks - 1) * wire),
    }
    for name, expected in formulas.items():
        assert seconds(name, ranks, count, 4, LINE) == pytest.approx(expected, rel=1e-6), name


def test_small_messages_are_for_trees_and_large_ones_for_rings() -> None:
    small = {name: seconds(name, 16, 2, 4, LINE) for name in ALGORITHMS}
    large = {name: seconds(name, 16, SIZE // 4, 4, LINE) for name in ALGORITHMS}
    assert small["tree"] < small["ring"]
    assert large["ring"] < large["tree"] < large["ps"]


def test_a_slow_link_between_nodes_is_for_hierarchies() -> None:
    nodes, slow = [[0, 1, 2, 3], [4, 5, 6, 7]], Line(1e-4, 1e8)
    times = {name: seconds(name, 8, SIZE // 4, 4, LINE, nodes, slow) for name in ALGORITHMS}
    assert min(times, key=lambda name: times[name]) == "hierarchical"
    # All that a node sends must leave it: 2 S (m - 1) / m of two nodes.
    assert times["hierarchical"] > SIZE / slow.bandwidth
    assert traffic("hierarchical", 8, SIZE // 4, 4, nodes).of_node == SIZE


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_sends_nothing_and_takes_no_time(name: str) -> None:
    assert seconds(name, 1, 100, 4, LINE) == 0.0
    assert traffic(name, 1, 100, 4).of_rank == 0


def test_bytes_over_the_busiest_link() -> None:
    sent = {name: traffic(name, 4, 1000, 4).of_rank for name in ALGORITHMS}
    assert sent == {
        "ps": 12000,
        "ring": 6000,
        "tree": 8000,
        "halving-doubling": 6000,
        "hierarchical": 6000,
    }
