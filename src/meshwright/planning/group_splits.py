"""How work is dealt out to chips of several kinds: layers of stages by their chips, samples by shares. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import gcd

from meshwright.planning.bounds import layer_kinds
from meshwright.planning.group_times import GroupTimer
from meshwright.planning.timing import Timer
from meshwright.schedules import placement_of
from meshwright.strategy import Strategy

MOST_SHARE = 16
"""The largest number of shares of a rank that is looked at."""


def layers_by_chip(timer: GroupTimer) -> list[int] | None:
    """Layers of each stage, so that the slowest rank is as fast as can be; None where all ranks are alike."""
    scenario, layout = timer.scenario, timer.scenario.layout
    spec, ranks = scenario.spec, range(layout.pp)
    paces, heads = [], []
    for rank in ranks:
        times = [timer.timer(column.groups[rank], column.share) for column in timer.columns]
        paces.append(max(map(_layer_pace, times)))
        heads.append(max(sum(one.layers.head()) for one in times))
    if len(set(paces)) == 1:
        return None
    placement = placement_of(layout.schedule, layout.pp)
    chunks = [placement.count(rank) for rank in ranks]
    head = [heads[rank] if placement[-1] == rank else 0.0 for rank in ranks]
    sizes = share_out(spec.num_hidden_layers, paces, head, chunks)
    if sizes is None:
        return None
    found = [0] * len(placement)
    for rank in ranks:
        own = [stage for stage, holder in enumerate(placement) if holder == rank]
        for place, stage in enumerate(own):
            found[stage] = sizes[rank] // len(own) + (place < sizes[rank] % len(own))
    return found


def _layer_pace(timer: Timer) -> float:
    """Seconds of a layer's passes, on average over all of them."""
    spec, total = timer.scenario.spec, 0.0
    for sparse, count in layer_kinds(spec):
        one = timer.layers.layer(sparse, False)
        total += count * (one.forward + one.backward + one.weights + one.tp + one.ep + one.cp)
    return total / spec.num_hidden_layers


def share_out(layers: int, paces: Sequence[float], extra: Sequence[float], least: Sequence[int]) -> list[int] | None:
    """Layers for ranks that take so long for each, and so long beside; the last one to finish is as early as can be.

    One layer after the other goes to the rank that would be done first with it, which is best for layers that are all
    alike. None where there are not enough of them.
    """
    sizes = list(least)
    if sum(sizes) > layers:
        return None
    for _ in range(layers - sum(sizes)):
        rank = min(range(len(sizes)), key=lambda one: (extra[one] + (sizes[one] + 1) * paces[one], one))
        sizes[rank] += 1
    return sizes


def moves(sizes: Sequence[int]) -> Iterator[list[int]]:
    """All splits with one layer in another stage."""
    for source, target in product(range(len(sizes)), repeat=2):
        if source != target and sizes[source] > 1:
            other = list(sizes)
            other[source] -= 1
            other[target] += 1
            yield other


def shares_by_chip(timer: GroupTimer, batch: int) -> list[tuple[float, str]]:
    """Shares of the data-parallel ranks that divide all batches, each with the least seconds of a step; best first.

    Nothing where all data-parallel ranks have the same chips.
    """
    scenario, layout = timer.scenario, timer.scenario.layout
    ranks = {column.groups: column.data_ranks for column in timer.columns}
    if len(ranks) == 1:
        return []
    held = list(ranks)
    work = cache(lambda place, share: timer.work(held[place], share))
    found: list[tuple[float, str]] = []
    for numbers in dict.fromkeys(_numbers([work(place, 1) for place in range(len(held))])):
        parts = sum(number * len(ranks[kind]) for number, kind in zip(numbers, held, strict=True))
        if len(set(numbers)) == 1 or gcd(*numbers) > 1 or batch % (parts * scenario.micro_batch):
            continue
        longest = max(work(place, number) for place, number in enumerate(numbers))
        each = [0] * layout.dp
        for kind, number in zip(held, numbers, strict=True):
            for rank in ranks[kind]:
                each[rank] = number
        shares = Strategy(replicate=layout.dp, shares="+".join(map(str, each))).shares
        found.append((longest * scenario.global_batch / (parts * scenario.micro_batch), shares))
    return sorted(found)


def _numbers(paces: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Shares for kinds of ranks: all of two kinds, the nearest to their speeds of more."""
    if len(paces) == 2:
        yield from product(range(1, MOST_SHARE + 1), repeat=2)
        return
    fastest = min(paces)
    for most in range(1, MOST_SHARE + 1):
        exact = [most * fastest / pace for pace in paces]
        yield from product(*(sorted({max(1, int(one)), max(1, -int(-one // 1))}) for one in exact))
