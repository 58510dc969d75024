"""A plan as JSON: the stable form, of which docs/plan.md says what is in it. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.planning.explain import explain
from meshwright.planning.group_words import placed_json, ways_json
from meshwright.planning.made import Plan
from meshwright.planning.memory import Terms
from meshwright.planning.origin import origin
from meshwright.planning.placement_words import placement_json
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB, UpdateStates, update_states


def plan_json(made: Plan) -> dict[str, Any]:
    """All of a plan."""
    question, cluster = made.question, made.question.cluster
    return {
        "schema": 1,
        "model": made.model,
        "cluster": {
            "chip": cluster.chip.key,
            "gpus": cluster.gpus,
            "gpus_per_node": cluster.node,
            "memory_gib": round(cluster.memory / GIB, 2),
            "groups": [
                {
                    "chip": group.chip.key,
                    "gpus": group.gpus,
                    "gpus_per_node": group.node,
                    "memory_gib": round(group.memory / GIB, 2),
                }
                for group in cluster.groups
            ],
        },
        "sequence_length": question.sequence_length,
        "global_batch": question.global_batch,
        "precision": question.precision,
        **asdict(question.kept),
        "constraints": [str(one) for one in question.constraints],
        "origin": origin(question),
        "best": candidate_json(made, made.best) if made.best is not None else None,
        "candidates": [candidate_json(made, one) for one in made.candidates],
        "runners_up": [
            {
                "family": one.family,
                "candidate": candidate_json(made, one.candidate) if one.candidate is not None else None,
                "change_to_fit": str(one.change) if one.change is not None else None,
                "reason": one.reason,
            }
            for one in made.runners
        ],
        "tried": [one.as_json() for one in made.tried],
        "fewer_gpus": [candidate_json(made, one) for one in made.fewer],
        "ways": ways_json(made.found),
        "why": explain(made),
        "searched": None if made.found is None else {"estimated": made.found.estimated, "bounded": made.found.bounded},
    }


def candidate_json(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """One candidate."""
    memory, parts = candidate.memory, candidate.parts
    finite = candidate.step_s < float("inf")
    fullest = memory.stages[memory.fullest]
    scenario = candidate.scenario
    ranks = scenario.ranks(quick=len(memory.stages) < scenario.layout.pp)
    states = [update_states(scenario, rank) for rank in ranks]
    days, cost = (plan.days(candidate), plan.cost(candidate)) if finite else (None, None)
    return {
        "strategy": str(candidate.strategy),
        "micro_batch": candidate.micro_batch,
        "gpus": candidate.scenario.cluster.gpus,
        "placement": placed_json(candidate),
        "links": placement_json(candidate) if finite else None,
        "verdict": memory.verdict,
        "memory": {
            "peak_gib": round(memory.peak / GIB, 3),
            "allocated_gib": round(fullest.allocated / GIB, 3),
            "margin_gib": round((memory.capacity - memory.peak) / GIB, 3),
            "fullest_stage": memory.fullest,
            "terms": terms_gib(fullest),
            "bytes": kinds_bytes(fullest, states[memory.fullest]),
            "by_stage": [
                {
                    "peak_gib": round(terms.total / GIB, 3),
                    "capacity_gib": round(memory.room(rank) / GIB, 3),
                    "margin_gib": round((memory.room(rank) - terms.total) / GIB, 3),
                    "verdict": memory.verdict_of(rank),
                    "terms": terms_gib(terms),
                    "bytes": kinds_bytes(terms, states[rank]),
                }
                for rank, terms in enumerate(memory.stages)
            ],
            "host_gib": round(memory.host / GIB, 3),
            "peaks": peaks_gib(candidate),
        },
        "step_time_s": round(candidate.step_s, 6) if finite else None,
        "step_time": {name: round(value, 6) for name, value in vars(parts).items()} if finite else None,
        "tokens_per_s_per_gpu": round(candidate.tokens_per_s_per_gpu, 3) if finite else None,
        "mfu": round(candidate.mfu, 5) if finite else None,
        "days": None if days is None else round(days, 3),
        "cost": None if cost is None else round(cost, 2),
        "origin": candidate.origin,
    }


def terms_gib(terms: Terms) -> dict[str, float]:
    """The terms of one rank."""
    return {name: round(value / GIB, 4) for name, value in vars(terms).items()}


def kinds_bytes(terms: Terms, states: UpdateStates) -> dict[str, int]:
    """Whole bytes of one rank by kinds that a run can measure: states when the update comes, then what the peak has
    beyond them: in torch's hands, and outside of them. They add up to the peak."""
    # Shards are padded to whole rows, as the terms' parameters are.
    padding = terms.parameters / states.parameters if states.parameters else 1.0
    states = UpdateStates(*(size * padding for size in states))
    held = sum(states)
    # A peak at which gradients are not there yet may have less in torch's hands than all states together.
    beyond = max(0.0, terms.allocated - held)
    kinds = {**states._asdict(), "activations": beyond, "outside": terms.total - max(terms.allocated, held)}
    return {name: round(max(0.0, size)) for name, size in kinds.items()}


def peaks_gib(candidate: Candidate) -> dict[str, float]:
    """The peaks of the fullest rank at four times, with what the driver and the communicators hold."""
    terms = candidate.memory.stages[candidate.memory.fullest]
    always = terms.context + terms.communicators
    states = terms.parameters + terms.gradients + terms.optimizer
    return {
        "initialisation": round((terms.parameters + terms.context) / GIB, 3),
        "forward_backward": round(terms.total / GIB, 3),
        # A fused update works in place; what was fragmented stays reserved.
        "optimizer_step": round((states + terms.fragmentation + always) / GIB, 3),
        # Shards are copied to host memory one by one.
        "checkpoint": round((states + always) / GIB, 3),
    }
