"""The order of machines that is searched for: racks that were scrambled are found again, by many machines too."""

from __future__ import annotations

import random
import time
from itertools import combinations, product
from unittest.mock import patch

import pytest

from meshwright.axis_order import AXES, orders
from meshwright.cluster.fabric import Fabric
from meshwright.planning import node_order
from meshwright.planning.axis_traffic import CHAIN, EXCHANGE, RING, AxisTraffic
from meshwright.planning.link_loads import link_loads
from meshwright.planning.node_order import Effort, Nodes, _Search, best_nodes
from meshwright.planning.placement import Placement, place
from meshwright.strategy import Strategy

GB = 1e9
SUMS, PASSED, LAYERS = (
    AxisTraffic("loss", RING, 4 * GB),
    AxisTraffic("pp", CHAIN, GB / 5),
    AxisTraffic("tp", RING, 8 * GB),
)
CASES = {
    "dp={half} pp=2": (SUMS, PASSED),
    "dp=2 pp={half}": (SUMS, PASSED),
    "dp={half} tp=2": (SUMS, LAYERS),
    "dp={machines} zero=3 replicate=2": (AxisTraffic("state", RING, 8 * GB), AxisTraffic("replicate", RING, GB)),
    "dp={machines} ep={half}": (AxisTraffic("ep", EXCHANGE, 8 * GB), SUMS),
    "dp=2 tp=4 pp={half}": (SUMS, PASSED, LAYERS),
}


def racks(machines: int, seed: int) -> list[int]:
    """The rack of each machine, in the order in which they have met."""
    found = [0, 1] * (machines // 2)
    random.Random(seed).shuffle(found)
    return found


def two_racks(of: list[int], chips: int, shared: bool) -> Fabric:
    """Machines in two racks with a tenth between them: one link for all, or one for every two of them."""
    first, second = ([machine for machine, rack in enumerate(of) if rack == side] for side in (0, 1))
    pairs = [(frozenset(first), frozenset(second))] if shared else [
        (frozenset([one]), frozenset([other])) for one, other in product(first, second)
    ]  # fmt: skip
    return Fabric((chips,) * len(of), 300 * GB, 50 * GB, tuple((one, other, GB) for one, other in pairs))


@pytest.mark.parametrize("machines", [8, 16, 32])
@pytest.mark.parametrize("shared", [True, False], ids=["one link", "a link for every two"])
@pytest.mark.parametrize("text", CASES)
def test_scrambled_racks_are_found_again(text: str, shared: bool, machines: int) -> None:
    chips = 4 if "tp=4" in text else 1
    strategy = Strategy.parse(text.format(half=machines // 2, machines=machines), machines * chips)
    of = racks(machines, machines)
    fabric = two_racks(of, chips, shared)
    best, _ = place(strategy, CASES[text], fabric)
    # Racks one after the other, or every other machine from the same: one of them is best for some order of axes.
    behind = sorted(range(machines), key=lambda machine: of[machine])
    between = [one for pair in zip(behind[: machines // 2], behind[machines // 2 :], strict=True) for one in pair]
    known = [
        Placement(order, tuple(nodes), link_loads(strategy, order, CASES[text], fabric), fabric).seconds
        for order in orders(strategy)
        for nodes in (behind, between)
    ]
    # What is usual stays where something else is at most a little better.
    assert best.seconds <= min(known) / 0.95


@pytest.mark.parametrize("machines", [8, 16])
def test_a_path_that_many_share_counts_as_slow_though_it_has_the_bandwidth_of_one_for_two(machines: int) -> None:
    """Every two machines have a path of their own, and all that goes between the racks shares one that is no wider."""
    even, odd = range(0, machines, 2), range(1, machines, 2)
    pairs = [(frozenset([one]), frozenset([other]), 25 * GB) for one, other in combinations(range(machines), 2)]
    shared = (frozenset(even), frozenset(odd), 25 * GB)
    fabric = Fabric((8,) * machines, 400 * GB, 50 * GB, (*pairs, shared))
    strategy, traffic = Strategy.parse(f"dp={machines * 8} zero=3", machines * 8), [AxisTraffic("state", RING, 10 * GB)]
    best, plain = place(strategy, traffic, fabric)
    in_a_row = Placement(AXES, (*even, *odd), plain.loads, fabric)
    assert best.seconds <= in_a_row.seconds / 0.95
    assert best.seconds < 0.5 * plain.seconds


def test_many_machines_take_a_moment_and_always_the_same() -> None:
    strategy, of = Strategy.parse("dp=8 tp=4 pp=8 zero=3", 256), racks(64, 5)
    traffic = (AxisTraffic("state", RING, 8 * GB), PASSED, LAYERS)
    fabric = two_racks(of, 4, shared=False)
    started = time.perf_counter()
    best, _ = place(strategy, traffic, fabric)
    assert time.perf_counter() - started < 5
    assert place(strategy, traffic, fabric)[0].key == best.key


def search_of(strategy: Strategy, traffic: tuple[AxisTraffic, ...], fabric: Fabric) -> tuple[_Search, Placement]:
    given = tuple(range(len(fabric.counts)))
    start = Placement(AXES, given, link_loads(strategy, AXES, traffic, fabric), fabric)
    return _Search(start.loads, fabric, start.waited, Effort(1e7)), start


@pytest.mark.parametrize("machines", [8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_swaps_cross_a_plateau(machines: int, seed: int) -> None:
    """Two pipeline stages whose sums go over a slow link as long as one machine of the other rack is among them."""
    strategy = Strategy.parse(f"dp={machines // 2} pp=2", machines)
    of = racks(machines, seed)
    search, start = search_of(strategy, (SUMS, PASSED), two_racks(of, 1, shared=False))
    found = search.improved(start.nodes, 0.0)
    stages = [{of[node] for node in found[: machines // 2]}, {of[node] for node in found[machines // 2 :]}]
    assert sorted(map(sorted, stages)) == [[0], [1]]
    assert search.rate(found)[0] < 0.2 * search.rate(start.nodes)[0]


@pytest.mark.parametrize("machines", [5, 6, 7])
def test_the_search_finds_what_trying_all_orders_finds(machines: int) -> None:
    def of(nodes: Nodes) -> float:
        return search.rate(nodes)[0]

    strategy, short = Strategy.parse(f"dp={machines}", machines), []
    for seed in range(12):
        draw = random.Random(seed)
        paths = tuple(
            (frozenset([one]), frozenset([other]), GB * draw.choice((1, 10)))
            for one in range(machines)
            for other in range(one)
        )
        fabric = Fabric((1,) * machines, 300 * GB, 50 * GB, paths)
        search, start = search_of(strategy, (SUMS,), fabric)
        asked = (start.loads, fabric, start.nodes, start.waited, 0.0)
        exact = best_nodes(*asked, Effort())
        with patch.object(node_order, "EXACT", 0):
            found = best_nodes(*asked, Effort())
        short.append(of(found) / of(exact))
    assert short == [1.0] * 12
