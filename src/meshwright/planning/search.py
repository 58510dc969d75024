"""Search: the strategy that is best for a model on a cluster, among all that the trainer can run. No torch.

Degrees and the micro-batch are taken in the order of a bound below which no choice of the rest can bring the step; when
the bound of the next is not below the best so far, nothing better is left, and the search ends. The rest is searched in
full: ZeRO stage, copies, schedule, layer split, recompute, host memory. Of recompute=first:N only the least N that fits
can be best, since each further layer costs time and saves memory. What a search covers is in `space`, the bounds are in
`bounds`.

Distribution is a cost: a feature must earn one percent, or the choice without it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import UserError
from meshwright.planning.bounds import (
    Least,
    bound_with_memory,
    bound_with_offload,
    in_order,
    layer_kinds,
    needed_layers,
)
from meshwright.planning.least_memory import least_memory, nearest
from meshwright.planning.memory import does_fit, memory_of
from meshwright.planning.nothing import no_degrees
from meshwright.planning.question import FEATURE, Candidate, Found, Question, count_features
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.space import Degrees, Space, allowed, plain
from meshwright.planning.timing import Timer
from meshwright.schedules import splits_backward, stages_per_rank
from meshwright.strategy import host_activations, host_states

OBJECTIVES = ("throughput", "memory", "cost", "fewest-gpus")


def check_objective(objective: str) -> None:
    """Raise a UserError unless that can be searched for."""
    if objective not in OBJECTIVES:
        raise UserError(f"--objective={objective} is not one of {', '.join(OBJECTIVES)}")


def search(question: Question, objective: str = "throughput", keep: int = 40) -> Found:
    """The best strategy and its runners-up; the same question has the same answer always."""
    check_objective(objective)
    if question.cluster.groups:
        from meshwright.planning.group_search import search_groups

        return search_groups(question, objective, keep)
    # On machines of one kind, what takes the least time costs the least.
    objective = "memory" if objective == "memory" else "throughput"
    if not question.allows(shares="even"):
        given = ", ".join(str(one) for one in question.constraints if one.key == "shares")
        raise UserError(
            f"constraint {given}: all of {question.cluster} are of one kind, and equal shares are best for them; "
            "drop it, or estimate other shares with --strategy"
        )
    space = Space(question)
    pending = in_order(space)
    if not pending:
        raise UserError(no_degrees(question))
    if objective == "memory":
        return _known_to_exist(question, least_memory(question, space, pending, keep))
    found: list[Candidate] = []
    estimated = bounded = 0
    # A little more than what is known to be possible, so that it is found again.
    start = _possible(question, space, pending)
    best = start.score(objective)[0] * (1 + 1e-9) if start is not None else float("inf")
    for offload in space.offloads():
        if found and host_activations(offload) and not _may_gain(found, offload):
            continue
        for index, degrees in enumerate(pending):
            if degrees.bound >= best:
                bounded += len(pending) - index
                break
            stages = [
                zero
                for zero in space.zero_stages(degrees, offload)
                if (offload == "none" or bound_with_offload(question, degrees, offload, zero, degrees.dp) < best)
                and space.may_hold(degrees, offload, zero)
            ]
            if not stages:
                continue
            if bound_with_memory(degrees, Least(space, degrees, offload)) >= best:
                bounded += 1
                continue
            for candidate in _choices(question, space, degrees, offload, stages, best):
                estimated += 1
                found.append(candidate)
                best = min(best, candidate.score(objective)[0])
    found.sort(key=lambda one: one.score(objective))
    closest = None if found else nearest(question, space, pending)
    return _known_to_exist(question, Found(found[0] if found else None, found[:keep], closest, estimated, bounded))


def _may_gain(found: list[Candidate], offload: str) -> bool:
    """Whether activations in host memory are looked at: in place of recompute, or to go with it; with more beside them
    only where nothing else fits."""
    best = min(found, key=lambda one: one.score("throughput"))
    return "+" not in offload and best.strategy.recompute != "none"


def _known_to_exist(question: Question, found: Found) -> Found:
    """What was found; a UserError where it is the constraints, and not memory, that leave nothing."""
    closest = found.nearest
    nothing = found.best is None and (closest is None or (closest.fits and bool(question.constraints)))
    # What was run here before is not searched again, and can be all that there is.
    if nothing and not question.left_out:
        raise UserError(no_degrees(question))
    return found


def plain_best(question: Question, most: int = 1 << 30) -> Candidate | None:
    """The best of the plain strategies (1f1b, even stages, recompute in whole steps): a quick answer, seldom far off.

    It looks at `most` degrees at most.
    """
    space = Space(question)
    return _possible(question, space, in_order(space)[:most])


def _possible(question: Question, space: Space, pending: Sequence[Degrees]) -> Candidate | None:
    """A good strategy, found among the plain ones: a good start cuts most of the search."""
    best: Candidate | None = None
    score = float("inf")
    for degrees in pending:
        if degrees.bound >= score:
            break
        for zero in space.zero_stages(degrees, "none"):
            if not space.may_hold(degrees, "none", zero):
                continue
            for recompute in ("none", "selective", "full"):
                layout = replace(plain(degrees), zero=zero, shard=degrees.dp if zero else 1, recompute=recompute)
                weight = 1 + FEATURE * count_features(layout)
                if degrees.bound * weight / (1 + FEATURE * 4) >= score or not allowed(question, layout):
                    continue
                if question.leaves_out(layout, degrees.micro_batch):
                    continue
                scenario = question.scenario(layout, degrees.micro_batch)
                if not does_fit(scenario):
                    continue
                own = space.timer(degrees).like(scenario)
                if own.parts(simulate=False).total * weight < score:
                    parts = own.parts()
                    if parts.total * weight < score:
                        memory = memory_of(scenario, quick=True)
                        found = Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, parts)
                        found = space.waits.added(found)
                        if found.step_s * weight < score:
                            best, score = found, found.step_s * weight
                break
    return best


@dataclass(frozen=True)
class _Choice:
    """Everything but recompute."""

    layout: Layout
    rough: float
    """A score below which recompute cannot bring it."""
    alone: float
    """The same without what is waited for paths, of which recompute may hide a part."""


def _choices(
    question: Question, space: Space, degrees: Degrees, offload: str, stages: Sequence[int], best: float
) -> Iterator[Candidate]:
    """Candidates with these degrees and ZeRO stages that fit and may be better than the best."""
    timer = space.timer(degrees)
    rest = _rest_of(question, space, degrees, offload, stages, best)
    for choice in sorted(rest, key=lambda one: one.rough):
        if choice.rough >= best:
            return
        for chosen in _with_recompute(question, choice, degrees, timer, best):
            if question.leaves_out(chosen, degrees.micro_batch) or not question.takes(chosen):
                continue
            scenario = question.scenario(chosen, degrees.micro_batch)
            own = timer.like(scenario)
            parts = own.parts(simulate=False)
            weight = 1 + FEATURE * count_features(chosen)
            if parts.total * weight >= best:
                continue
            if chosen.pp > 1:
                parts = own.parts()
            memory = memory_of(scenario, quick=True)
            candidate = Candidate(chosen.strategy(), degrees.micro_batch, scenario, memory, parts)
            candidate = space.waits.added(candidate)
            best = min(best, candidate.step_s * weight)
            yield candidate


def _rest_of(
    question: Question, space: Space, degrees: Degrees, offload: str, stages: Sequence[int], best: float
) -> Iterator[_Choice]:
    """Choices that may fit and may be better than the best, without recompute."""
    timer = space.timer(degrees)
    for zero, shard, method in space.states(degrees):
        if zero not in stages or (degrees.ep > 1 and shard % degrees.ep and degrees.ep % shard):
            continue
        base = replace(plain(degrees), zero=zero, shard=shard, cp_method=method, offload=offload)
        # How long activations are on their way depends on what is computed again: a floor does without.
        fastest = replace(base, offload=host_states(offload))
        weight = 1 + FEATURE * count_features(base)
        if offload != "none" and bound_with_offload(question, degrees, offload, zero, shard) >= best:
            continue
        plainest = question.scenario(fastest, degrees.micro_batch)
        if degrees.pp > 1:
            floor = timer.like(plainest).without_gaps()
            if floor * weight >= best:
                continue
        schedules = space.schedules(degrees, zero)
        waits = space.waits.floor(plainest, max(map(stages_per_rank, schedules), default=1))
        if degrees.pp > 1 and (floor + waits.beside(floor)) * weight >= best:
            continue
        for schedule, layers in space.orders(degrees, zero):
            if base.host_activations and splits_backward(schedule):
                continue
            layout = replace(base, schedule=schedule, layers=layers)
            weight = 1 + FEATURE * count_features(layout)
            if space.order_floor(degrees, method, schedule, layers) * weight >= best or not question.takes(layout):
                continue
            scenario = question.scenario(replace(layout, offload=fastest.offload), degrees.micro_batch)
            least = timer.like(scenario).parts(simulate=False).total
            rough = (least + waits.beside(least)) * weight
            if rough < best:
                yield _Choice(layout, rough, least * weight)


def _with_recompute(
    question: Question, choice: _Choice, degrees: Degrees, timer: Timer, best: float
) -> Iterator[Layout]:
    """What fits of none, selective, first:N with the least N, and full, and may be better than the best."""
    layout = choice.layout

    def scenario(recompute: str) -> Scenario:
        return question.scenario(replace(layout, recompute=recompute), degrees.micro_batch)

    if layout.host_activations:
        # The more is computed again, the less is on its way: any of them may be the fastest.
        for recompute in ("none", "selective", "full"):
            if question.allows(recompute=recompute) and does_fit(scenario(recompute)):
                yield replace(layout, recompute=recompute)
        return
    if question.allows(recompute="none") and does_fit(scenario("none")):
        yield layout
        return
    # Recompute is one more feature to earn its place.
    used = count_features(layout)
    weight = (1 + FEATURE * (used + 1)) / (1 + FEATURE * used)
    if choice.rough * weight >= best:
        return
    if question.allows(recompute="selective") and does_fit(scenario("selective")):
        yield replace(layout, recompute="selective")
    if not does_fit(scenario("full")):
        return
    layers = question.spec.num_hidden_layers
    if degrees.pp == 1:
        needed = needed_layers(memory_of(scenario("none")), memory_of(scenario("full")), layers)
        forward = min(timer.layers.layer(sparse, True).forward for sparse, _ in layer_kinds(question.spec))
        micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
        if choice.alone * weight + micro_steps * needed * forward >= best:
            return
    if question.allows(recompute="first:1"):
        low, high = 0, layers
        while high - low > 1:
            middle = (low + high) // 2
            tried = scenario(f"first:{middle}")
            if does_fit(tried):
                high = middle
                continue
            low = middle
            # More layers than these are needed, and they take too long already.
            if timer.like(tried).floor() * (1 + FEATURE * (used + 1)) >= best:
                return
        while high < layers and not question.takes(replace(layout, recompute=f"first:{high}")):
            high += 1
        if high < layers:
            yield replace(layout, recompute=f"first:{high}")
            return
    if question.allows(recompute="full"):
        yield replace(layout, recompute="full")
