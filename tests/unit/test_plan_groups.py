"""Machines of several kinds: stages and shares by the speed of chips, and the search that chooses among the ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import gcd

import pytest

from meshwright.cluster.chips import make_chip
from meshwright.cluster.cluster import Cluster, of_chip, parse_cluster
from meshwright.cluster.groups import kinds, together
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.planning.answer import plan
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.group_search import SHARES, STAGES, search_groups
from meshwright.planning.group_splits import MOST_SHARE, share_out
from meshwright.planning.group_times import GroupTimer, columns_of, memory_on, timer_on
from meshwright.planning.group_words import placed
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.scenario import Layout
from meshwright.planning.search import search
from meshwright.planning.space import Degrees, Space
from meshwright.planning.timing import Timer
from meshwright.schedules import stages_per_rank
from meshwright.strategy import Strategy
from tests.unit.specs import PLANNED as SMALL


def chips(name: str, tflops: float, gib: float, gpus: int, nic: float = 50) -> Cluster:
    facts = {"memory_mib": gib * 1024, "memory_bandwidth": 5 * tflops, "tflops": {"bf16": tflops, "fp16": tflops}}
    return of_chip(make_chip(name, {**facts, "link": 450, "nic": nic, "domain": 4, "node": 4}), gpus, node=min(4, gpus))


def question(cluster: Cluster, batch: int = 64, constraints: str = "", spec: ModelSpec = SMALL) -> Question:
    return Question(spec, cluster, 2048, batch, constraints=parse_constraints([constraints]))


FAST_AND_SLOW = together([chips("fast", 900, 80, 4), chips("slow", 300, 80, 4)])


def test_machines_of_one_kind_are_estimated_as_before() -> None:
    """A group beside another of the very same speed changes nothing."""
    one, other = chips("one", 500, 80, 4), chips("other", 500, 80, 4)
    for text in ("dp=8 zero=3", "dp=2 pp=4", "dp=2 zero=1 pp=2 tp=2 schedule=interleaved:2 recompute=full"):
        strategy = Strategy.parse(text, 8)
        alike = question(of_chip(one.chip, 8, node=4, domain=4))
        mixed = question(together([one, replace(other, chip=replace(other.chip, units=one.chip.units))]))
        expected, found = estimate(alike, strategy, 1), estimate(mixed, strategy, 1)
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        assert vars(found.parts) == pytest.approx(vars(expected.parts), rel=1e-9, abs=1e-12)
        assert [terms.total for terms in found.memory.stages] == [terms.total for terms in expected.memory.stages]


def test_ranks_are_placed_in_the_order_of_groups() -> None:
    layout = Layout.of(Strategy.parse("dp=2 pp=4", 8))
    assert [column.groups for column in columns_of(FAST_AND_SLOW, layout)] == [(0, 0, 1, 1)]
    across = Layout.of(Strategy.parse("dp=4 tp=2 shares=3+1", 8))
    assert [(one.groups, one.share, one.data_ranks) for one in columns_of(FAST_AND_SLOW, across)] == [
        ((0,), 3, (0, 1)),
        ((1,), 1, (2, 3)),
    ]


def test_a_step_takes_what_its_slowest_rank_takes() -> None:
    asked = question(FAST_AND_SLOW)
    equal, shared = (estimate(asked, Strategy.parse(text, 8), 1) for text in ("dp=8", "dp=8 shares=3+1"))
    slow = estimate(question(of_chip(FAST_AND_SLOW.groups[1].chip, 8, node=4, domain=4)), Strategy.parse("dp=8", 8), 1)
    assert equal.parts.compute == pytest.approx(slow.parts.compute)
    # A half of the samples on three times as fast chips, and a sixteenth for the others, in place of an eighth.
    assert shared.parts.compute == pytest.approx(equal.parts.compute / 2, rel=0.05)


def test_the_smallest_memory_counts_where_its_stage_is() -> None:
    cluster = together([chips("large", 500, 80, 1), chips("small", 500, 8, 1)])
    asked = question(cluster, 16)
    verdicts = {
        layers: estimate(asked, Strategy.parse(f"dp=1 pp=2 layers={layers}", 2), 1).memory for layers in ("7+1", "1+7")
    }
    assert verdicts["7+1"].verdict == "fits"
    assert verdicts["1+7"].verdict == "does not fit"
    assert verdicts["1+7"].fullest == 1
    assert verdicts["1+7"].capacity == pytest.approx(8 * 2**30)


def test_a_share_takes_the_memory_of_its_samples() -> None:
    asked = question(FAST_AND_SLOW)
    shared = memory_on(asked.scenario(Strategy.parse("dp=8 shares=3+1", 8), 1))
    large = memory_on(asked.scenario(Strategy.parse("dp=8", 8), 3))
    assert shared.peak == large.peak


def test_shares_on_one_kind_of_machines_are_estimated_too() -> None:
    asked = question(chips("one", 500, 80, 4))
    uneven = asked.scenario(Strategy.parse("dp=4 shares=3+1", 4), 4)
    assert isinstance(timer_on(uneven, asked.known), GroupTimer)
    equal = Timer(asked.scenario(Strategy.parse("dp=4", 4), 8), asked.known).parts()
    assert timer_on(uneven, asked.known).parts().compute > 1.4 * equal.compute


@pytest.mark.parametrize(
    ("paces", "extra", "layers"),
    [([1, 3], [0, 0], 8), ([1, 1, 2.5, 2.5], [0, 0, 0, 2.0], 13), ([1, 2, 3], [0.5, 0, 1], 9), ([5, 1], [0, 7], 6)],
)
def test_layers_by_speed_are_the_best_of_all_splits(paces: list[float], extra: list[float], layers: int) -> None:
    def longest(sizes: tuple[int, ...]) -> float:
        return max(size * pace + more for size, pace, more in zip(sizes, paces, extra, strict=True))

    cuts = combinations(range(1, layers), len(paces) - 1)
    every = [tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]
    found = share_out(layers, paces, extra, [1] * len(paces))
    assert found is not None
    assert longest(tuple(found)) == pytest.approx(min(map(longest, every)))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cut), (*cut, total), strict=True))


def everything(asked: Question, way: str) -> Iterator[Candidate]:
    """Every strategy with every split of the layers, or every pair of shares, and every recompute."""
    alike = replace(asked, cluster=replace(asked.cluster, groups=()))
    space = Space(replace(alike, global_batch=32 * asked.cluster.gpus) if way == SHARES else alike)
    layers = asked.spec.num_hidden_layers
    words = ["none", "selective", "full", *(f"first:{count}" for count in range(1, layers))]
    for degrees in space.degrees():
        if any(group.gpus % (degrees.tp * degrees.cp) for group in asked.cluster.groups):
            continue
        for zero, shard, method in space.states(degrees):
            for schedule, layers_and_shares in _dealt(asked, space, degrees, zero, way):
                for recompute in words:
                    if not asked.allows(recompute=recompute, offload="none"):
                        continue
                    layout = Layout(
                        dp=degrees.dp, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, expert_tp=degrees.tp, zero=zero,
                        shard=shard, sp=degrees.tp > 1, schedule=schedule, cp_method=method, recompute=recompute,
                        layers=layers_and_shares[0], shares=layers_and_shares[1],
                    )  # fmt: skip
                    found = estimate(asked, layout.strategy(), degrees.micro_batch)
                    if found.fits:
                        yield found


def _dealt(
    asked: Question, space: Space, degrees: Degrees, zero: int, way: str
) -> Iterator[tuple[str, tuple[str, str]]]:
    schedules = space.schedules(degrees, zero)
    if way == STAGES and degrees.pp > 1:
        for schedule in schedules:
            stages = degrees.pp * stages_per_rank(schedule)
            for sizes in compositions(asked.spec.num_hidden_layers, stages):
                yield schedule, ("+".join(map(str, sizes)), "even")
    if way == SHARES and degrees.pp == 1 and degrees.dp > 1:
        half = degrees.dp // 2
        for one, other in product(range(1, MOST_SHARE + 1), repeat=2):
            parts = (one + other) * half * degrees.micro_batch
            if gcd(one, other) == 1 and one != other and asked.global_batch % parts == 0:
                yield "1f1b", ("even", f"{one}+{other}")


@pytest.mark.parametrize(
    ("cluster", "batch", "constraints"),
    [
        (together([chips("fast", 900, 80, 1), chips("slow", 300, 80, 1)]), 32, "schedule=1f1b"),
        (together([chips("fast", 900, 12, 1), chips("slow", 300, 80, 1)]), 32, "schedule=1f1b"),
        (together([chips("slow", 300, 80, 2), chips("fast", 900, 80, 2)]), 32, "schedule=1f1b cp=1 micro_batch<=2"),
        (together([chips("fast", 900, 80, 1), chips("slow", 450, 80, 1)]), 16, "schedule=interleaved:2 pp=2"),
    ],
)
def test_the_search_over_stages_finds_what_trying_everything_finds(
    cluster: Cluster, batch: int, constraints: str
) -> None:
    asked = question(cluster, batch, constraints)
    best = min(everything(asked, STAGES), key=lambda one: one.score("throughput"))
    found = search_groups(asked).ways[STAGES]
    assert found is not None
    assert found.score("throughput")[0] == pytest.approx(best.score("throughput")[0], rel=1e-9), (
        found.strategy,
        best.strategy,
    )


@pytest.mark.parametrize(
    ("cluster", "batch", "constraints"),
    [
        (together([chips("fast", 900, 80, 2), chips("slow", 300, 80, 2)]), 64, ""),
        (together([chips("fast", 700, 24, 2), chips("slow", 300, 24, 2)]), 120, ""),
        (together([chips("slow", 300, 80, 4), chips("fast", 700, 24, 4)]), 240, "tp<=2"),
    ],
)
def test_the_search_over_shares_finds_what_trying_everything_finds(
    cluster: Cluster, batch: int, constraints: str
) -> None:
    asked = question(cluster, batch, f"pp=1 {constraints}")
    best = min(everything(asked, SHARES), key=lambda one: one.score("throughput"))
    found = search_groups(asked).ways[SHARES]
    assert found is not None
    assert found.score("throughput")[0] == pytest.approx(best.score("throughput")[0], rel=1e-9), (
        found.strategy,
        best.strategy,
    )


def test_the_fastest_way_wins_and_all_are_shown() -> None:
    asked = question(FAST_AND_SLOW, 128)
    found = search(asked)
    assert found.best is not None
    assert [name.partition(" ")[0] for name in found.ways] == ["only", "only", "all", "a", "shares"]
    times = [one.score("throughput")[0] for one in found.ways.values() if one is not None]
    assert found.best.score("throughput")[0] == min(times)
    assert found.best.scenario.layout.shares != "even" or found.best.scenario.layout.pp > 1
    assert search(asked).best == found.best


def test_chips_that_are_not_worth_it_are_left_out() -> None:
    """A machine twenty times as slow behind a slow network only costs."""
    crawling = chips("crawling", 40, 80, 4, nic=0.5)
    found = search(question(together([chips("fast", 900, 80, 4, nic=0.5), crawling]), 64))
    assert found.best is not None
    assert str(found.best.scenario.cluster) == "4 x fast"


def test_groups_of_one_kind_are_one() -> None:
    assert parse_cluster("8xh100+8xh100") == parse_cluster("16xh100")
    apart = parse_cluster("8xh100+8xa100+8xh100")
    assert [group.gpus for group in apart.groups] == [8, 8, 8]
    assert [str(kind)[:2] for kind in kinds(apart)] == ["16", "8 "]


def test_the_answer_says_who_is_where() -> None:
    made = plan("llama3.2-1b", "8xh100+8xa100", sequence_length=2048, global_batch=256)
    assert made.best is not None
    facts = made.as_json()
    assert [group["gpus"] for group in facts["cluster"]["groups"]] == [8, 8]
    held = facts["best"]["placement"]
    assert [one["ranks"] for one in held] in ([(0, 7), (8, 15)], [])
    assert len(facts["ways"]) == 5
    assert any("the choice" in line for line in facts["why"])
    strategy = Strategy.parse(facts["best"]["strategy"], facts["best"]["gpus"])
    strategy.check(preset("llama3.2-1b"), strategy.world, 2048)
    strategy.micro_steps(256, facts["best"]["micro_batch"])


def test_words_name_stages_and_shares() -> None:
    asked = question(FAST_AND_SLOW)
    stages, shares = (
        [str(one) for one in placed(estimate(asked, Strategy.parse(text, 8), 1))]
        for text in ("dp=4 pp=2 layers=6+2", "dp=8 shares=3+1")
    )
    assert stages == [
        "ranks 0-3 on fast: pipeline rank 0 with 6 layers, data ranks 0-3",
        "ranks 4-7 on slow: pipeline rank 1 with 2 layers, data ranks 0-3",
    ]
    assert shares == [
        "ranks 0-3 on fast: data ranks 0-3, 3 shares each",
        "ranks 4-7 on slow: data ranks 4-7, 1 share each",
    ]


def test_the_cheapest_way_counts_the_chips_that_it_uses() -> None:
    fast, slow = chips("fast", 900, 80, 4), chips("slow", 300, 80, 4)
    priced = question(together([replace(fast, price=3.0), replace(slow, price=2.5)]), 128)
    quickest, cheapest = search(priced).best, search(priced, "cost").best
    assert quickest is not None
    assert cheapest is not None
    assert quickest.scenario.cluster.gpus == 8
    assert str(cheapest.scenario.cluster) == "4 x fast"
    given_away = question(together([replace(fast, price=3.0), replace(slow, price=0.01)]), 128)
    found = search(given_away, "cost").best
    assert found is not None
    assert str(found.scenario.cluster) == "4 x slow"


def test_the_least_memory_is_planned_without_regard_to_speed() -> None:
    found = search(question(FAST_AND_SLOW, 64), "memory")
    assert found.best is not None
    assert found.best.memory.peak == min(one.memory.peak for one in found.ranked)
