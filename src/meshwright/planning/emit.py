"""A plan as a run file that `meshwright train` takes as it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tomli_w

from meshwright.errors import UserError
from meshwright.models.presets import presets
from meshwright.planning.answer import Plan
from meshwright.planning.explain import beyond_positions
from meshwright.planning.group_words import placed


def run_table(plan: Plan, data: str | None = None) -> dict[str, Any]:
    """The settings of a run with the best strategy."""
    best = plan.best
    if best is None:
        raise UserError("nothing fits, so there is no run to write; meshwright plan says what comes nearest")
    question = plan.question
    question.spec.check_buildable()
    beyond = beyond_positions(question)
    if beyond is not None:
        raise UserError(f"--emit run: {beyond}")
    name = plan.model.lower().replace("_", "-")
    model: dict[str, Any] = {"preset": name} if name in presets() else {"spec": _spec(plan)}
    steps = 1000
    if plan.tokens is not None:
        steps = max(1, round(plan.tokens / (question.global_batch * question.sequence_length)))
    return {
        "run": {"dir": f"runs/{name.split('/')[-1] if name in presets() else 'planned'}"},
        "model": model,
        "data": {"path": data or "data/packed", "sequence_length": question.sequence_length},
        "train": {
            "steps": steps,
            "global_batch": question.global_batch,
            "micro_batch": best.micro_batch,
            "precision": question.precision,
        },
        "parallel": {"strategy": str(best.strategy)},
        **({"precision": asdict(question.kept)} if str(question.kept) else {}),
    }


def _spec(plan: Plan) -> dict[str, Any]:
    return plan.question.spec.model_dump(mode="json", exclude_none=True)


def run_file(plan: Plan, data: str | None = None) -> str:
    """The same as TOML, with what is expected of it."""
    best = plan.best
    table = run_table(plan, data)
    assert best is not None
    cluster = best.scenario.cluster
    head = (
        f"# Planned for {cluster}: {best.step_s:.3g} s a step, "
        f"{best.tokens_per_s_per_gpu:,.0f} tokens/s and GPU, {best.memory.peak / 2**30:.1f} GiB at the peak.\n"
        f"# Start it on {cluster.gpus} ranks. data.path is a folder of `meshwright data prepare`.\n"
    )
    head += "".join(f"# {one[0].upper()}{one[1:]}.\n" for one in map(str, placed(best))) + "\n"
    return head + tomli_w.dumps(table)
