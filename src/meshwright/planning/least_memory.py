"""What needs the least memory: as the aim of a search, and as the nearest where nothing fits. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.planning.memory import memory_of
from meshwright.planning.question import Candidate, Found, Question, estimate
from meshwright.planning.space import Degrees, Space, allowed, most_recompute, plain
from meshwright.planning.timing import Parts


def least_memory(question: Question, space: Space, pending: Sequence[Degrees], keep: int) -> Found:
    """What needs the least memory, without host memory unless it is asked for: all recompute, the leanest schedule."""
    offload = next((one for one in ("none", "optimizer", "parameters") if question.allows(offload=one)), "none")
    sized = [
        (memory_of(question.scenario(layout, degrees.micro_batch), quick=True).peak, index, layout, degrees)
        for index, (degrees, layout) in enumerate(
            (degrees, layout)
            for degrees in pending
            for zero in space.zero_stages(degrees, offload)
            for layout in space.smallest(degrees, offload, zero)
            if allowed(question, layout)
        )
    ]
    found = []
    for _, _, layout, degrees in sorted(sized, key=lambda one: one[:2])[:keep]:
        found.append(estimate(question, layout.strategy(), degrees.micro_batch))
    fitting = sorted((one for one in found if one.fits), key=lambda one: one.score("memory"))
    nearest = None if fitting or not found else found[0]
    return Found(fitting[0] if fitting else None, fitting, nearest, len(sized), 0)


def nearest(question: Question, space: Space, pending: Sequence[Degrees]) -> Candidate | None:
    """Where nothing fits, what needs the least memory."""
    found: Candidate | None = None
    offload = next((one for one in ("parameters", "optimizer", "none") if question.allows(offload=one)), "none")
    for degrees in pending:
        for zero in space.zero_stages(degrees, offload) or space.zero_stages(degrees, "none"):
            layout = replace(
                plain(degrees),
                zero=zero,
                shard=degrees.dp if zero else 1,
                offload=offload if space.zero_stages(degrees, offload) else "none",
                recompute=most_recompute(question),
            )
            scenario = question.scenario(layout, degrees.micro_batch)
            memory = memory_of(scenario, quick=True)
            if found is None or memory.peak < found.memory.peak:
                found = Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, Parts(other=float("inf")))
    return found
