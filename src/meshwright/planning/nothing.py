"""Why there is nothing to search: which constraint leaves nothing on these machines, and what to change. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planning.constraints import Constraint, not_searched
from meshwright.planning.question import Question
from meshwright.planning.space import LEAST_CONTEXT, Space


def no_degrees(question: Question) -> str:
    """In words."""
    outside = not_searched(question.constraints)
    if outside is not None:
        return outside
    gpus, batch = question.cluster.gpus, question.global_batch
    given = ", ".join(map(str, question.constraints))
    if not given:
        return (
            f"a global batch of {batch} cannot be dealt out to {gpus} GPUs: what tensor, pipeline and context parallel "
            f"leave must divide it; use a multiple of {gpus}, or of a large divisor of it"
        )
    reasons = [f"{one}: {why}" for one in question.constraints for why in _reasons(question, one)]
    if reasons:
        return f"no strategy for {gpus} GPUs meets the constraints; {'; '.join(reasons)}"
    if question.only is not None:
        typed = ", ".join(str(one) for one in question.constraints if str(one) not in question.only.words)
        meets = f"meets {typed}, fits" if typed else "fits"
        return f"no strategy for {gpus} GPUs {meets} and can be written" + ("; drop one of them" if typed else "")
    told = f"no strategy for {gpus} GPUs and a global batch of {batch} meets {given}"
    larger = replace(question, global_batch=batch * gpus, batches=())
    if not any(Space(question).degrees()) and any(Space(larger).degrees()):
        return f"{told}; data parallel ranks must divide the batch: change it, or drop a constraint"
    return f"{told}; drop one of them" if len(question.constraints) > 1 else f"{told}; drop it"


def _reasons(question: Question, one: Constraint) -> Iterator[str]:
    """What is wrong with a constraint by itself."""
    spec, gpus, length = question.spec, question.cluster.gpus, question.sequence_length
    if one.key == "ep" and spec.experts is None and not one.holds({"ep": 1}):
        yield "the model has no experts"
        return
    if one.sign != "=" or not isinstance(one.value, int):
        return
    value = one.value
    if one.key in ("dp", "tp", "pp", "cp") and gpus % value:
        yield f"{value} does not divide {gpus} GPUs"
    elif one.key == "tp" and value > question.cluster.domain:
        yield f"{question.cluster.domain} GPUs share fast links"
    elif one.key == "tp" and (spec.num_attention_heads % value or spec.intermediate_size % value):
        yield f"it does not divide {spec.num_attention_heads} heads and a width of {spec.intermediate_size}"
    elif one.key == "pp" and value > spec.num_hidden_layers:
        yield f"the model has {spec.num_hidden_layers} layers"
    elif one.key == "cp" and (length // value < LEAST_CONTEXT or length % (2 * value)):
        yield f"sequences of {length} tokens leave a rank {length // value}; at least {LEAST_CONTEXT} are searched"
    elif one.key == "ep" and spec.experts is not None and spec.experts.num_experts % value:
        yield f"it does not divide {spec.experts.num_experts} experts"
