"""A plan in words and numbers: what peaks where, what the step goes into, what others lose on, what else would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.models.count import count_parameters
from meshwright.models.shapes import shapes_of
from meshwright.planning.group_words import stage_chips, ways
from meshwright.planning.made import Plan
from meshwright.planning.memory import FITS, Terms
from meshwright.planning.narrow import in_words
from meshwright.planning.question import Candidate, Question
from meshwright.planning.state_memory import GIB
from meshwright.planning.whole_at_first import whole_at_first

if TYPE_CHECKING:
    from meshwright.planning.tryout import Tried

TERMS = {
    "parameters": "parameters",
    "gathered": "parameters gathered or cast for computing",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "attention": "activations of attention and norms",
    "feed_forward": "activations of feed-forwards",
    "layer_inputs": "inputs of recomputed layers",
    "working": "the layer at work",
    "logits": "logits and loss",
    "buffers": "communication buffers",
    "fragmentation": "fragmentation",
    "communicators": "NCCL",
    "context": "driver's context",
    "correction": "seen in runs here",
}
PARTS = {
    "compute": "compute",
    "recompute": "recompute",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "experts' exchange",
    "dp": "data parallel",
    "bubble": "pipeline gaps",
    "optimizer": "optimizer",
    "offload": "host memory",
    "other": "data, clipping, jitter",
    "paths": "waiting for paths between machines",
    "correction": "seen in runs here",
}


def largest_term(terms: Terms) -> tuple[str, float]:
    """The largest term of a rank, in words, and its bytes."""
    name = max(TERMS, key=lambda one: getattr(terms, one))
    return TERMS[name], getattr(terms, name)


def model_states(plan: Plan) -> str:
    """The sum that comes before anything is split: in float32, for any model."""
    count = count_parameters(plan.question.spec).total
    scale, letter, unit = (1e9, "B", "GB") if count >= 1e8 else (1e6, "M", "MB")
    size = count * 4 / scale
    return (
        f"{plan.model}: {count / scale:.2f}{letter} parameters; in float32 {size:.1f} {unit} of parameters + "
        f"{2 * size:.1f} {unit} of Adam moments + {size:.1f} {unit} of gradients = {4 * size:.1f} {unit} before "
        "activations"
    )


def beyond_positions(question: Question) -> str | None:
    """Why the trainer refuses the sequence length, if it does."""
    length, positions = question.sequence_length, question.spec.max_position_embeddings
    if length <= positions:
        return None
    return (
        f"sequences of {length} are longer than the model's {positions} positions, and the trainer refuses them; "
        f"use --seq-len {positions} or less, or a config.json with more max_position_embeddings"
    )


def _tried(tried: Sequence[Tried]) -> str:
    """What came of running candidates here."""
    ran = sorted((one for one in tried if one.step_s is not None), key=lambda one: one.step_s or 0.0)
    first = tried[0]
    told = f"of {len(tried)} tried here {ran[0].candidate.strategy} was the fastest: {ran[0].step_s:.3g} s a step"
    if first.step_s is None:
        return f"{told}; {first.candidate.strategy}, predicted to be the fastest, failed: {first.failure}"
    if first.candidate.same_choice(ran[0].candidate):
        return f"{told}, as predicted"
    return f"{told}; {first.candidate.strategy}, predicted to be the fastest, took {first.step_s:.3g} s"


def explain(plan: Plan) -> list[str]:
    """Sentences, the most important first."""
    beyond = beyond_positions(plan.question)
    lines = [model_states(plan), *([f"warning: {beyond}"] if beyond is not None else [])]
    best = plan.best
    if best is None:
        return lines + _nothing_fits(plan)
    if plan.tried:
        lines.append(_tried(plan.tried))
    memory = best.memory
    terms = memory.stages[memory.fullest]
    term, size = largest_term(terms)
    where = f"pipeline rank {memory.fullest} of {len(memory.stages)}" if len(memory.stages) > 1 else "every rank alike"
    if best.scenario.cluster.groups:
        where = f"{where.removesuffix(' alike')} of the {stage_chips(best)[memory.fullest]}"
    lines.append(
        f"memory peaks at {memory.peak / GIB:.1f} of {memory.capacity / GIB:.1f} GiB on {where}; the largest part is "
        f"{term} ({size / GIB:.1f} GiB); up to {FITS:.0%} counts as safe"
    )
    lines.append(time_goes_into(best))
    lines += _vain_compression(best)
    lines += _whole_at_first(plan.question, best)
    lines += ways(plan.found)
    for runner in plan.runners:
        if runner.candidate is None:
            continue
        line = f"{runner.family} ({runner.candidate.strategy}): {runner.reason}"
        if runner.change is not None:
            line += f"; cheapest change that makes it fit: {runner.change}"
        lines.append(line)
    lines.extend(fewer_chips(best, other) for other in plan.fewer)
    return lines + _narrower(plan)


def time_goes_into(candidate: Candidate) -> str:
    """What a step is spent on; where runs here were faster than estimated, of what was estimated."""
    gained = max(0.0, -candidate.parts.correction)
    estimated = candidate.step_s + gained
    share = {name: getattr(candidate.parts, name) / estimated for name in PARTS}
    spent = sorted(
        (name for name in share if name != "compute" and share[name] >= 0.005), key=lambda name: -share[name]
    )
    rest = ", ".join(f"{PARTS[name]} {share[name]:.1%}" for name in spent) or "nothing else of note"
    told = f"of the step {share['compute']:.1%} is compute; beside it {rest}"
    return told if gained < 0.005 * estimated else f"{told}; runs here took {gained / estimated:.1%} less in all"


def _vain_compression(candidate: Candidate) -> list[str]:
    scenario = candidate.scenario
    shapes, element = list(shapes_of(scenario.spec).values()), int(scenario.held_bytes[1])
    vain = scenario.layout.compression.in_vain(shapes, scenario.layout.dp, element)
    return [] if vain is None else [f"warning: {vain}"]


def _whole_at_first(question: Question, candidate: Candidate) -> list[str]:
    """That a run with this compression begins without it, and what that makes of its time."""
    begun = whole_at_first(question, candidate)
    if begun is None:
        return []
    return [
        f"a step's time is that of compressed ones: {candidate.scenario.layout.compression.kind} begins after "
        f"{begun.share:.0%} of a run (comm.compress_after=auto), whose steps take {begun.whole_s:.3g} s before, "
        f"{begun.mean_s:.3g} s on average over all"
    ]


def fewer_chips(best: Candidate, other: Candidate) -> str:
    """What fewer chips would do."""
    gpus, all_gpus = other.scenario.cluster.gpus, best.scenario.cluster.gpus
    time = other.step_s / best.step_s
    work = time * gpus / all_gpus - 1
    verdict = "the same work for less" if work < -0.02 else "as efficient" if work < 0.02 else "less efficient"
    hours = "as many" if abs(work) < 0.0005 else f"{work:+.1%}"
    return f"on {gpus} GPUs ({other.strategy}) a step takes {time:.2f} times as long and {hours} GPU-hours: {verdict}"


def _nothing_fits(plan: Plan) -> list[str]:
    nearest = plan.shown
    memory = nearest.memory
    term, size = largest_term(memory.stages[memory.fullest])
    lines = [
        f"nothing fits on {plan.question.cluster} with these settings; nearest is {nearest.strategy} with micro-batch "
        f"{nearest.micro_batch}: {memory.peak / GIB:.1f} of {memory.capacity / GIB:.1f} GiB (safe up to {FITS:.0%}), "
        f"of which {term} are {size / GIB:.1f} GiB"
    ]
    if memory.host > memory.host_capacity:
        lines.append(f"host memory: {memory.host / GIB:.0f} of {memory.host_capacity / GIB:.0f} GiB a chip")
    changes = [runner.change for runner in plan.runners if runner.change is not None]
    return [*lines, *(f"cheapest change that makes it fit: {change}" for change in changes), *_narrower(plan)]


def _narrower(plan: Plan) -> list[str]:
    return [in_words(plan.narrower, plan.best)] if plan.narrower is not None else []
