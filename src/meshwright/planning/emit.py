"""A plan as a run file that `meshwright train` takes as it is."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import tomli_w

from meshwright.cluster.cluster import Cluster
from meshwright.errors import UserError
from meshwright.models.presets import presets
from meshwright.planning.carried import Carried
from meshwright.planning.explain import beyond_positions
from meshwright.planning.group_words import placed
from meshwright.planning.made import Plan


def run_table(plan: Plan, data: str | None = None, carried: Carried | None = None) -> dict[str, Any]:
    """The settings of a run with the best strategy, and those that it is not asked about."""
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
    carried = carried or Carried()
    others = carried.config.model_dump(exclude_defaults=True, exclude_none=True)
    others.pop("model", None)
    kept = {key: value for key, value in others.pop("precision", {}).items() if key not in ("stored", "moments")}
    kept |= asdict(question.kept) if str(question.kept) else {}
    path = {} if carried.has_data and data is None else {"path": data or "data/packed"}
    planned = {
        "run": {"dir": f"runs/{name.split('/')[-1] if name in presets() else 'planned'}", **others.pop("run", {})},
        "model": model,
        "data": {**others.pop("data", {}), **path, "sequence_length": question.sequence_length},
        "train": {
            **others.pop("train", {}),
            "steps": carried.steps(question, plan.tokens),
            "global_batch": question.global_batch,
            "micro_batch": best.micro_batch,
            "precision": question.precision,
        },
        "parallel": {**others.pop("parallel", {}), "strategy": str(best.strategy)},
        **({"precision": kept} if kept else {}),
    }
    return planned | others


def _spec(plan: Plan) -> dict[str, Any]:
    return plan.question.spec.model_dump(mode="json", exclude_none=True)


def _file_of(cluster: Cluster) -> str:
    """The cluster file as parallel.cluster takes it: a name alone needs its ending to be one."""
    return cluster.note if cluster.note.endswith(".toml") else os.path.join(os.curdir, cluster.note)


def run_file(plan: Plan, carried: Carried) -> str:
    """The same as TOML, with what is expected of it."""
    best = plan.best
    table = run_table(plan, carried=carried)
    assert best is not None
    cluster = best.scenario.cluster
    if cluster.paths:
        # A run puts its ranks and machines in the order that was planned with, which follows from the paths.
        table["parallel"]["cluster"] = _file_of(cluster)
    head = (
        f"# Planned for {cluster}: {best.step_s:.3g} s a step, "
        f"{best.tokens_per_s_per_gpu:,.0f} tokens/s and GPU, {best.memory.peak / 2**30:.1f} GiB at the peak.\n"
        f"# Start it on {cluster.gpus} ranks. data.path is a folder of `meshwright data prepare`, or a prefix of\n"
        "# Megatron's token files.\n"
        f"# {carried.told}\n"
    )
    head += "".join(f"# {one[0].upper()}{one[1:]}.\n" for one in map(str, placed(best))) + "\n"
    return head + tomli_w.dumps(table)
