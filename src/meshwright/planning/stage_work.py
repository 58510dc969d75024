"""What each rank of a pipeline should take for its passes, as the plan reckons with them. No torch."""

from __future__ import annotations

from meshwright.planning.group_times import timer_on
from meshwright.planning.question import Candidate
from meshwright.planning.software import constants
from meshwright.schedules import placement_of


def stage_work(candidate: Candidate) -> list[dict[str, float]]:
    """Seconds of one micro-batch by phase, for each pipeline rank; nothing where there is no pipeline."""
    strategy = candidate.strategy
    if strategy.pp == 1:
        return []
    times = timer_on(candidate.scenario, constants()).stage_times()
    work = [{"forward": 0.0, "backward": 0.0} for _ in range(strategy.pp)]
    for stage, rank in enumerate(placement_of(strategy.schedule, strategy.pp)):
        work[rank]["forward"] += times.forward[stage]
        work[rank]["backward"] += times.backward[stage] + times.weights[stage]
    return work
