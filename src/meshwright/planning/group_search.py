"""Search on machines of several kinds: which of four ways to use them is the fastest. No torch.

    one kind      only the chips of one kind work
    pace          all work alike; the slowest chip sets the pace
    stages        a pipeline over the groups, with as many layers for each stage as its chips are fast
    shares        data-parallel ranks take shares of every batch by the speed of their chips

Each way is searched for its best strategy, and the fastest of these wins: a slow chip can be worth less than it costs.
For the last two, degrees are taken in the order of a bound: all chips together compute no faster than each by itself
with nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2

from meshwright.cluster.groups import kinds
from meshwright.errors import UserError
from meshwright.planning.bounds import layer_kinds
from meshwright.planning.group_splits import MOST_SHARE, layers_by_chip, moves, shares_by_chip
from meshwright.planning.group_times import GroupTimer, memory_on, on_group
from meshwright.planning.memory import Memory
from meshwright.planning.nothing import no_degrees
from meshwright.planning.question import FEATURE, Candidate, Found, Question, count_features, estimate
from meshwright.planning.scenario import Layout
from meshwright.planning.search import search
from meshwright.planning.space import Degrees, Space, allowed, most_recompute, plain
from meshwright.planning.timing import Timer
from meshwright.schedules import splits_backward, stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import OFFLOAD

PACE = "all alike, at the pace of the slowest chip"
STAGES = "a pipeline over the groups, stages by the speed of their chips"
SHARES = "shares of every batch by the speed of the chips"
SLOWER = 1.2
"""By how much a way may be slower than the best one and still be looked at in full."""
MOST_STAGES = 16
"""Stages up to which single layers are moved to look for a better split."""
RECHECKED = 12
"""Of the strategies that are found for the slowest chip, how many are estimated for all of them."""


def search_groups(question: Question, objective: str = "throughput", keep: int = 40) -> Found:
    """The best way to use chips of several kinds, and the best strategy of each way."""
    ways: dict[str, Candidate | None] = {}
    found: list[Candidate] = []
    by = "memory" if objective == "memory" else "throughput"
    estimated = bounded = 0
    nearest = None
    for kind in [] if question.all_chips else kinds(question.cluster):
        try:
            one = search(replace(question, cluster=kind), by, keep)
        except UserError:
            # Its number divides no batch, or meets no constraint.
            one = Found(None, [], None, 0, 0)
        ways[f"only {kind}"] = one.best
        found += one.ranked
        estimated, bounded, nearest = estimated + one.estimated, bounded + one.bounded, nearest or one.nearest
    alike, failing = _at_the_pace(question, by, keep)
    ways[PACE] = alike[0] if alike else None
    found += alike
    best = min((one.score(by)[0] for one in found), default=float("inf"))
    # What needs the least memory has nothing to do with speed.
    for name in (STAGES, SHARES) if by == "throughput" else ():
        searched = _Uneven(question, name)
        own = searched.run(best * SLOWER)
        ways[name] = own[0] if own else None
        found += own
        estimated, bounded = estimated + searched.estimated, bounded + searched.bounded
        best = min([best, *(one.score(by)[0] for one in own[:1])])
    found.sort(key=lambda one: one.score(objective))
    nearest = failing or nearest
    if not found and (nearest is None or nearest.fits):
        raise UserError(no_degrees(question))
    return Found(found[0] if found else None, found[:keep], nearest, estimated, bounded, ways)


def _at_the_pace(question: Question, objective: str, keep: int) -> tuple[list[Candidate], Candidate | None]:
    """What is best where all chips are like the slowest one, as it is on those that there are; or the nearest to it."""
    slowest = replace(question, cluster=replace(question.cluster, groups=()))
    try:
        found = search(slowest, objective, keep)
    except UserError:
        return [], None
    checked = [estimate(question, one.strategy, one.micro_batch) for one in found.ranked[:RECHECKED]]
    best = sorted((one for one in checked if one.fits), key=lambda one: one.score(objective))
    closest = found.nearest and estimate(question, found.nearest.strategy, found.nearest.micro_batch)
    return best, closest


class _Uneven:
    """The search of one way to deal out work by the speed of chips."""

    def __init__(self, question: Question, way: str) -> None:
        self.question, self.way = question, way
        # The number of ranks must not divide the batch where shares do.
        world = question.cluster.gpus
        alike = replace(question, cluster=replace(question.cluster, groups=()))
        self.space = Space(replace(alike, global_batch=32 * world, batches=()) if way == SHARES else alike)
        self.estimated = self.bounded = 0
        self._paces: dict[tuple[int, ...], float] = {}
        self._sizes: dict[tuple[object, ...], list[int] | None] = {}

    def run(self, best: float) -> list[Candidate]:
        """All that fit and may be better, best first."""
        pending = sorted(
            (replace(one, bound=self.bound(one)) for one in self._degrees()),
            key=lambda one: (one.bound, one.tp, one.pp, one.cp, one.ep, -one.micro_batch),
        )
        found: list[Candidate] = []
        for offload in OFFLOAD:
            if found or not self.question.allows(offload=offload):
                continue
            for index, degrees in enumerate(pending):
                if degrees.bound >= best:
                    self.bounded += len(pending) - index
                    break
                if not self._may_hold(degrees, offload):
                    continue
                for candidate in self._choices(degrees, offload, best):
                    found.append(candidate)
                    best = min(best, candidate.score("throughput")[0])
        found.sort(key=lambda one: one.score("throughput"))
        return [self._moved(found[0]), *found[1:]] if found else []

    def _degrees(self) -> Iterator[Degrees]:
        """Those under which the ranks of a block have one kind of chip, and blocks have different kinds."""
        cluster = self.question.cluster
        for degrees in self.space.degrees():
            width = degrees.tp * degrees.cp
            if any(group.gpus % width for group in cluster.groups) or (self.way == STAGES and degrees.pp == 1):
                continue
            if self.way == SHARES and degrees.dp == 1:
                continue
            yield degrees

    def bound(self, degrees: Degrees) -> float:
        """A score that nothing with these degrees can be below: every chip works all the time, at its best size."""
        question, cluster = self.question, self.question.cluster
        speed = 0.0
        sizes = range(1, MOST_SHARE + 1) if self.way == SHARES else (1,)
        for index, group in enumerate(cluster.groups):
            pace = min(self._pace(index, degrees, share) for share in sizes)
            speed += group.gpus / (degrees.tp * degrees.cp) / pace
        software = question.trainer
        nodes = max(1.0, cluster.gpus / max(1, cluster.node))
        steady = question.global_batch / speed
        floor = steady * (1 + (software.jitter * log2(nodes) if nodes > 1 else 0.0))
        axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
        return floor * (1 + FEATURE * (axes + 1))

    def _pace(self, group: int, degrees: Degrees, share: int) -> float:
        """Seconds in which a block of these chips takes a sample through the whole model."""
        size = share * degrees.micro_batch
        key = group, degrees.tp, degrees.cp, degrees.ep, size
        if key not in self._paces:
            scenario = on_group(self.question.scenario(plain(degrees), degrees.micro_batch), group, share)
            layers = Timer(scenario, self.question.known).layers
            work = sum(layers.head())
            for sparse, count in layer_kinds(self.question.spec):
                one = layers.layer(sparse, False)
                work += count * (one.forward + one.backward + one.weights + one.tp + one.ep)
            self._paces[key] = work / size
        return self._paces[key]

    def _choices(self, degrees: Degrees, offload: str, best: float) -> Iterator[Candidate]:
        """Candidates with these degrees that fit and may be better than the best."""
        timers: dict[tuple[int, int], Timer] = {}
        base = replace(plain(degrees), offload=offload)
        shares = [(0.0, "even")]
        if self.way == SHARES:
            timer = GroupTimer(self.question.scenario(base, degrees.micro_batch), self.question.known, timers)
            shares = shares_by_chip(timer, self.question.shared)
        for least, dealt in shares:
            if least >= best:
                return
            if dealt != "even" and not (self.question.allows(shares=dealt) and self._may_hold(degrees, offload, dealt)):
                continue
            for candidate in self._dealt(degrees, replace(base, shares=dealt), timers, best):
                best = min(best, candidate.score("throughput")[0])
                yield candidate

    def _dealt(
        self, degrees: Degrees, base: Layout, timers: dict[tuple[int, int], Timer], best: float
    ) -> Iterator[Candidate]:
        """Candidates with these degrees and shares."""
        rough: list[tuple[float, Layout]] = []
        for zero, shard, method in self.space.states(degrees):
            if degrees.ep > 1 and shard % degrees.ep and degrees.ep % shard:
                continue
            if zero not in self.space.zero_stages(degrees, base.offload):
                continue
            layout = replace(base, zero=zero, shard=shard, cp_method=method)
            for chosen in self._orders(degrees, layout, timers):
                timer = self._timer(chosen, degrees, timers)
                least = timer.parts(simulate=False).total * (1 + FEATURE * count_features(chosen))
                if least < best:
                    rough.append((least, chosen))
        for least, layout in sorted(rough, key=lambda one: (one[0], str(one[1].strategy()))):
            if least >= best:
                return
            used = count_features(layout)
            enough = best > least * (1 + FEATURE * (used + 1)) / (1 + FEATURE * used)
            for memory, chosen in self._with_recompute(layout, degrees, again=enough):
                candidate = self._candidate(chosen, degrees.micro_batch, memory, timers, best)
                if candidate is not None:
                    best = min(best, candidate.score("throughput")[0])
                    yield candidate

    def _timer(self, layout: Layout, degrees: Degrees, timers: dict[tuple[int, int], Timer]) -> GroupTimer:
        return GroupTimer(self.question.scenario(layout, degrees.micro_batch), self.question.known, timers)

    def _orders(self, degrees: Degrees, layout: Layout, timers: dict[tuple[int, int], Timer]) -> Iterator[Layout]:
        """With all schedules, and the layers of each stage."""
        for schedule in self.space.schedules(degrees, layout.zero):
            if layout.host_activations and splits_backward(schedule):
                continue
            ordered = replace(layout, schedule=schedule)
            splits = self.space.splits(degrees.pp, schedule) if self.way == SHARES else []
            if degrees.pp > 1:
                sizes = self._by_chip(ordered, degrees, timers)
                if sizes is not None:
                    splits = [*splits, *self._held(ordered, degrees, sizes)]
            for layers in dict.fromkeys(splits):
                chosen = replace(ordered, layers=layers)
                if allowed(self.question, chosen):
                    yield chosen

    def _by_chip(self, layout: Layout, degrees: Degrees, timers: dict[tuple[int, int], Timer]) -> list[int] | None:
        """Layers of each stage by the speed of its chips; what is sharded does not matter to that."""
        key = degrees, layout.schedule, layout.cp_method, layout.shares
        if key not in self._sizes:
            self._sizes[key] = layers_by_chip(self._timer(layout, degrees, timers))
        return self._sizes[key]

    def _may_hold(self, degrees: Degrees, offload: str, shares: str = "even") -> bool:
        """Whether anything with these degrees fits: all recompute, 1f1b, state spread as far as can be."""
        stages = self.space.zero_stages(degrees, offload)
        if not stages:
            return False
        layout = replace(
            plain(degrees), zero=stages[-1], shard=degrees.dp if stages[-1] else 1, offload=offload,
            recompute=most_recompute(self.question), shares=shares,
        )  # fmt: skip
        if degrees.pp == 1:
            return memory_on(self.question.scenario(layout, degrees.micro_batch)).verdict == "fits"
        even = stage_layers(self.question.spec, degrees.pp, "even")
        return bool(self._held(layout, degrees, [len(part) for part in even]))

    def _held(self, layout: Layout, degrees: Degrees, sizes: list[int]) -> list[str]:
        """The split, if it can fit; where a stage has more layers than its chip can hold, those that it can, and the
        others more; else nothing."""
        sizes = list(sizes)
        fullest, before = replace(layout, recompute=most_recompute(self.question)), float("inf")
        while True:
            split = replace(fullest, layers="+".join(map(str, sizes)))
            memory = memory_on(self.question.scenario(split, degrees.micro_batch))
            if memory.verdict == "fits":
                return [split.layers]
            filled = [terms.total / memory.room(rank) for rank, terms in enumerate(memory.stages)]
            source, target = memory.fullest, min(range(len(filled)), key=lambda rank: filled[rank])
            several = stages_per_rank(layout.schedule) > 1
            if several or source == target or sizes[source] == 1 or filled[source] >= before:
                return []
            before = filled[source]
            sizes[source] -= 1
            sizes[target] += 1

    def _with_recompute(self, layout: Layout, degrees: Degrees, again: bool = True) -> Iterator[tuple[Memory, Layout]]:
        """What fits of none, and, if recompute can be worth it, of selective, first:N with the least N, and full."""
        question, layers = self.question, self.question.spec.num_hidden_layers

        def memory(recompute: str) -> Memory:
            return memory_on(question.scenario(replace(layout, recompute=recompute), degrees.micro_batch))

        none = memory("none")
        if question.allows(recompute="none") and none.verdict == "fits":
            yield none, layout
            return
        if not again:
            return
        full = memory("full")
        if question.allows(recompute="selective"):
            found = memory("selective")
            if found.verdict == "fits":
                yield found, replace(layout, recompute="selective")
        if full.verdict != "fits":
            return
        if question.allows(recompute="first:1"):
            low, high = 0, layers
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if memory(f"first:{middle}").verdict == "fits" else (middle, high)
            if high < layers:
                yield memory(f"first:{high}"), replace(layout, recompute=f"first:{high}")
                return
        if question.allows(recompute="full"):
            yield full, replace(layout, recompute="full")

    def _candidate(
        self, layout: Layout, micro_batch: int, memory: Memory, timers: dict[tuple[int, int], Timer], best: float
    ) -> Candidate | None:
        """The candidate, unless it cannot be better than the best."""
        if self.question.leaves_out(layout, micro_batch):
            return None
        self.estimated += 1
        scenario = self.question.scenario(layout, micro_batch)
        timer = GroupTimer(scenario, self.question.known, timers)
        weight = 1 + FEATURE * count_features(layout)
        parts = timer.parts(simulate=False)
        if parts.total * weight >= best:
            return None
        return Candidate(layout.strategy(), micro_batch, scenario, memory, timer.parts())

    def _moved(self, best: Candidate) -> Candidate:
        """The same with single layers in other stages, as long as that is better."""
        layout = best.scenario.layout
        if layout.pp * stages_per_rank(layout.schedule) > MOST_STAGES or not _is_given(layout.layers):
            return best
        degrees = Degrees(layout.tp, layout.pp, layout.cp, layout.dp, layout.ep, best.micro_batch, layout.sp)
        timers: dict[tuple[int, int], Timer] = {}
        better = True
        while better:
            better = False
            sizes = [int(size) for size in best.scenario.layout.layers.split("+")]
            for other in moves(sizes):
                split = replace(best.scenario.layout, layers="+".join(map(str, other)), recompute="none")
                least = self._timer(split, degrees, timers).parts(simulate=False).total
                if least >= best.step_s or not allowed(self.question, split):
                    continue
                for memory, chosen in self._with_recompute(split, degrees):
                    score = best.score("throughput")[0]
                    found = self._candidate(chosen, best.micro_batch, memory, timers, score)
                    if found is not None and found.score("throughput")[0] < score:
                        best, better = found, True
        return best


def _is_given(layers: str) -> bool:
    return layers not in ("even", "balanced")
