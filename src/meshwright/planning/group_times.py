"""Time and memory of a step on machines of several kinds, or with unequal shares of the batch. No torch.

Ranks are placed in the order of the groups, so it is known which chip each pipeline rank of each data-parallel rank
has. Data-parallel ranks with the same chips and the same share take the same time: a column. Each stage takes what it
takes on its own chip, the step what its slowest column takes; what passes between groups goes at the pace of the
slowest network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from meshwright.cluster.cluster import Cluster
from meshwright.planning.memory import Memory, memory_of
from meshwright.planning.pipeline import StageTimes
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants
from meshwright.planning.state_memory import GIB
from meshwright.planning.timing import Flow, Parts, Passes, Timer, flow_of, length_of, parts_of
from meshwright.schedules import placement_of


@dataclass(frozen=True)
class Column:
    """Data-parallel ranks with the same share on the same chips."""

    groups: tuple[int, ...]
    """Of each pipeline rank."""
    share: int
    data_ranks: tuple[int, ...]


def is_uneven(scenario: Scenario) -> bool:
    """Whether ranks differ in their chips or in their shares."""
    return bool(scenario.cluster.groups) or scenario.layout.shares != "even"


def timer_on(scenario: Scenario, constants: Constants) -> Timer | GroupTimer:
    """What knows the times of a scenario."""
    return GroupTimer(scenario, constants) if is_uneven(scenario) else Timer(scenario, constants)


def columns_of(cluster: Cluster, layout: Layout) -> list[Column]:
    """Who has which chips and which share."""
    peaks = tuple((group.gpus, max(group.chip.tflops.values())) for group in cluster.groups)
    return _columns(peaks, layout.pp, layout.dp, layout.cp * layout.tp, layout.data_shares)


@lru_cache(maxsize=4096)
def _columns(
    groups: tuple[tuple[int, float], ...], pp: int, dp: int, width: int, parts: tuple[int, ...]
) -> list[Column]:
    """`groups` are numbers of chips with their speed; a block of ranks that has several kinds goes by the slowest."""
    ends = list(accumulate(gpus for gpus, _ in groups))
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for data_rank, share in enumerate(parts):
        held = []
        for stage in range(pp):
            first = (stage * dp + data_rank) * width
            touched = range(bisect_right(ends, first), bisect_right(ends, first + width - 1) + 1)
            held.append(min(touched, key=lambda group: groups[group][1]) if groups else 0)
        found.setdefault((tuple(held), share), []).append(data_rank)
    return [Column(held, share, tuple(ranks)) for (held, share), ranks in found.items()]


def on_group(scenario: Scenario, group: int, share: int) -> Scenario:
    """The scenario as a rank sees it that has that chip and that share: as if all were like it."""
    cluster, layout = scenario.cluster, scenario.layout
    if cluster.groups:
        cluster = replace(cluster.groups[group], gpus=cluster.gpus, nic=cluster.nic)
    micro_steps = max(1, round(scenario.micro_steps))
    return replace(
        scenario,
        cluster=cluster,
        layout=replace(layout, shares="even"),
        micro_batch=share * scenario.micro_batch,
        global_batch=micro_steps * layout.dp * share * scenario.micro_batch,
    )


class GroupTimer:
    """Times of a scenario's parts where ranks differ."""

    def __init__(
        self,
        scenario: Scenario,
        constants: Constants,
        timers: dict[tuple[int, int], Timer] | None = None,
    ) -> None:
        """`timers` are those of scenarios that differ in nothing that a layer's own passes depend on."""
        self.scenario, self.constants = scenario, constants
        self.columns = columns_of(scenario.cluster, scenario.layout)
        self._known = {} if timers is None else timers
        self._own: dict[tuple[int, int], Timer] = {}
        self._flows: list[Flow] | None = None

    def timer(self, group: int, share: int) -> Timer:
        """The times of a rank with that chip and that share."""
        key = group, share
        if key not in self._own:
            alike = on_group(self.scenario, group, share)
            if key not in self._known:
                self._known[key] = Timer(alike, self.constants)
            self._own[key] = self._known[key].like(alike)
        return self._own[key]

    def flows(self) -> list[Flow]:
        """Of every column. Where every micro-batch is waited for by all, they are one: the slowest of each stage."""
        if self._flows is None:
            layout = self.scenario.layout
            placement = placement_of(layout.schedule, layout.pp) if layout.pp > 1 else (0,)
            passes = [self._passes(column, placement) for column in self.columns]
            timers = [self.timer(group, one.share) for one in self.columns for group in set(one.groups)]
            transfers = [max(border) for border in zip(*(timer.transfers() for timer in timers), strict=True)]
            if layout.pp > 1 and (layout.zero == 3 or layout.ep > 1):
                slowest = [
                    max(stage, key=lambda one: one.forward + one.backward) for stage in zip(*passes, strict=True)
                ]
                passes = [slowest] * len(passes)
            self._flows = [flow_of(self.scenario, one, transfers) for one in passes]
        return self._flows

    def work(self, groups: tuple[int, ...], share: int) -> float:
        """Seconds that the slowest rank of such a column computes for a micro-batch."""
        layout = self.scenario.layout
        placement = placement_of(layout.schedule, layout.pp) if layout.pp > 1 else (0,)
        return flow_of(self.scenario, self._passes(Column(groups, share, ()), placement), ()).work

    def _passes(self, column: Column, placement: Sequence[int]) -> list[Passes]:
        found = {group: self.timer(group, column.share).passes() for group in set(column.groups)}
        return [found[column.groups[rank]][stage] for stage, rank in enumerate(placement)]

    def parts(self, simulate: bool = True) -> Parts:
        """The step; without simulation a lower bound of the pipeline's length stands in for it."""
        flows = self.flows()
        lengths = [length_of(self.scenario, flow, simulate) for flow in flows]
        slowest = max(range(len(flows)), key=lambda index: lengths[index])
        reduction = max(
            self.timer(column.groups[flow.slowest], column.share).states.reduction(
                flow.slowest, flow.forward, flow.backward
            )
            for column, flow in zip(self.columns, flows, strict=True)
        )
        column = self.columns[slowest]
        software = self.timer(column.groups[0], column.share).operations.software
        update = max(self._updates(), key=sum)
        return parts_of(self.scenario, software, flows[slowest], lengths[slowest], reduction, update)

    def _updates(self) -> list[tuple[float, float]]:
        """The optimizer's step on every kind of chip: of the pipeline ranks that have it."""
        ranks: dict[int, set[int]] = {}
        shares = {}
        for column in self.columns:
            for rank, group in enumerate(column.groups):
                ranks.setdefault(group, set()).add(rank)
                shares[group] = column.share
        return [self.timer(group, shares[group]).states.update(own) for group, own in ranks.items()]

    def slowest(self) -> Column:
        """The column that the others wait for."""
        lengths = [length_of(self.scenario, flow, True) for flow in self.flows()]
        return self.columns[max(range(len(lengths)), key=lambda index: lengths[index])]

    def stage_times(self) -> StageTimes:
        """Seconds of a micro-batch in each stage of that column."""
        return self.flows()[self.columns.index(self.slowest())].times


def memory_on(scenario: Scenario) -> Memory:
    """The peaks of every pipeline rank, each on the data-parallel rank whose chip it fills the most."""
    if not is_uneven(scenario):
        return memory_of(scenario)
    cluster, columns = scenario.cluster, columns_of(scenario.cluster, scenario.layout)
    by_share = {share: memory_of(on_group(scenario, 0, share)) for share in {column.share for column in columns}}
    terms, capacities = [], []
    for rank in range(scenario.layout.pp):
        held = [(by_share[column.share].stages[rank], cluster.kinds[column.groups[rank]].memory) for column in columns]
        fullest, room = max(held, key=lambda one: one[0].total / one[1])
        terms.append(fullest)
        capacities.append(room)
    host = max(memory.host for memory in by_share.values())
    whole = Memory(tuple(terms), host, cluster.memory, cluster.host_gib * GIB, tuple(capacities))
    return replace(whole, capacity=whole.room(whole.fullest))
