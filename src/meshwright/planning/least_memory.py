"""What needs the least memory: as the aim of a search, and as the nearest where nothing fits. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.planning.memory import memory_of
from meshwright.planning.question import Candidate, Found, Question, estimate
from meshwright.planning.scenario import Layout
from meshwright.planning.space import Degrees, Space, allowed, most_recompute, plain
from meshwright.planning.timing import Parts
from meshwright.schedules import splits_backward


def least_memory(question: Question, space: Space, pending: Sequence[Degrees], keep: int) -> Found:
    """What needs the least of a chip's memory: all recompute, the leanest schedule, host memory where it has room."""
    sized: list[tuple[bool, float, int, Layout, Degrees]] = []
    for offload in space.offloads():
        for degrees in pending:
            for layout in leanest(question, space, degrees, offload):
                memory = memory_of(question.scenario(layout, degrees.micro_batch), quick=True)
                sized.append((memory.verdict != "fits", memory.peak, len(sized), layout, degrees))
    found = []
    for *_, layout, degrees in sorted(sized, key=lambda one: one[:3])[:keep]:
        found.append(estimate(question, layout.strategy(), degrees.micro_batch))
    fitting = sorted((one for one in found if one.fits), key=lambda one: one.score("memory"))
    nearest = None if fitting or not found else found[0]
    return Found(fitting[0] if fitting else None, fitting, nearest, len(sized), 0)


def leanest(question: Question, space: Space, degrees: Degrees, offload: str) -> Iterator[Layout]:
    """What holds the least with each ZeRO stage, of what the constraints allow: both layer splits."""
    for zero in space.zero_stages(degrees, offload):
        states = [one for one in space.states(degrees) if one[0] == zero]
        schedules = space.schedules(degrees, zero)
        if not states or not schedules:
            continue
        _, shard, method = max(states, key=lambda one: one[1])
        for layers in space.splits(degrees.pp, schedules[0]):
            layout = replace(
                plain(degrees),
                zero=zero,
                shard=shard,
                cp_method=method,
                schedule=schedules[0],
                layers=layers,
                offload=offload,
                recompute=most_recompute(question),
            )
            if allowed(question, layout) and not (layout.host_activations and splits_backward(layout.schedule)):
                yield layout


def nearest(question: Question, space: Space, pending: Sequence[Degrees]) -> Candidate | None:
    """Where nothing fits, what needs the least memory of all that meets the constraints."""
    found: Candidate | None = None
    offloads = space.offloads()[::-1]
    for degrees in pending:
        own = next((one for one in offloads if space.zero_stages(degrees, one)), None)
        for layout in leanest(question, space, degrees, own) if own is not None else ():
            scenario = question.scenario(layout, degrees.micro_batch)
            memory = memory_of(scenario, quick=True)
            if found is None or memory.peak < found.memory.peak:
                found = Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, Parts(other=float("inf")))
    return found
