"""A strategy that was given, as a candidate; with its best micro-batch unless that is given too. No torch."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.errors import UserError
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.scenario import Layout
from meshwright.planning.space import allowed, micro_batches
from meshwright.strategy import Strategy


def estimate_given(question: Question, text: str, micro_batch: int | None) -> Candidate:
    """What comes of it; refuses what the trainer would refuse, and what the constraints exclude."""
    strategy = Strategy.parse(text, question.cluster.gpus)
    strategy.check(question.spec, question.cluster.gpus, question.sequence_length)
    strategy.micro_steps(question.global_batch, micro_batch)
    sizes = [micro_batch] if micro_batch is not None else _sizes(question, strategy)
    found = [estimate(question, strategy, size) for size in sizes]
    best = min(found, key=lambda one: one.score("throughput") if one.fits else (inf, one.memory.peak))
    layout, size = Layout.of(strategy), {"micro_batch": best.micro_batch}
    violated = [
        str(one)
        for one in question.constraints
        if not (allowed(replace(question, constraints=(one,)), layout) and one.holds(size))
    ]
    if violated:
        raise UserError(
            f"--strategy '{text}' with micro-batch {best.micro_batch} does not meet {', '.join(violated)}; "
            "drop one of them"
        )
    return best


def _sizes(question: Question, strategy: Strategy) -> list[int]:
    """Micro-batches to try: those that the constraints allow, or all where they allow none."""
    sizes = micro_batches(question, question.global_batch // strategy.all_shares, strategy.cp)
    return [size for size in sizes if question.allows(micro_batch=size)] or sizes
