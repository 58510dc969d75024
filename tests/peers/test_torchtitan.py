"""torchtitan's job configuration has the names that we write. It needs a GPU to be imported, so it is read."""

from __future__ import annotations

import ast
import functools
import math
import tomllib
import types
from importlib.metadata import files
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.interop.torchtitan_emit import FLAVORS, torchtitan_file
from meshwright.planning.answer import plan
from meshwright.planning.carried import Carried
from meshwright.training.schedule import learning_rate


def source(name: str) -> str:
    (found,) = [file for file in files("torchtitan") or [] if str(file) == name]
    return found.read_text()


def classes() -> dict[str, dict[str, str]]:
    """Fields of the dataclasses, with their types as text."""
    tree = ast.parse(source("torchtitan/config/job_config.py"))
    return {
        node.name: {
            item.target.id: ast.unparse(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def check(table: dict[str, Any], name: str, known: dict[str, dict[str, str]]) -> None:
    for key, value in table.items():
        kind = known[name][key]
        if isinstance(value, dict):
            check(value, kind, known)
        elif kind.startswith("Literal"):
            assert value in ast.literal_eval(kind.removeprefix("Literal")), (name, key)
        else:
            expected = {str: "str", bool: "bool", int: "int", float: "float"}[type(value)]
            assert expected in kind or (expected == "int" and "float" in kind), (name, key, kind)


@pytest.mark.parametrize(
    "strategy",
    ["zero=3", "zero=2 recompute=selective", "zero=3 tp=2 pp=2 schedule=interleaved:2 recompute=full", "zero=3 cp=2"],
)
def test_every_name_and_value_is_one_of_its_own(strategy: str) -> None:
    made = plan("llama3.1-8b", "16xh200", sequence_length=1024, global_batch=64, strategy=strategy, micro_batch=1)
    check(tomllib.loads(torchtitan_file(made, Carried())), "JobConfig", classes())


def multipliers(table: dict[str, Any], steps: int) -> Any:
    """What its schedule multiplies the learning rate of a step with: its own function, taken out of its source."""
    tree = ast.parse(source("torchtitan/components/lr_scheduler.py"))
    (build,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "build_lr_schedulers"]
    known = {"math": math, "functools": functools, "LRSchedulersContainer": lambda optimizers, multiplier: multiplier}
    exec(compile(ast.Module([build], []), "its own", "exec"), known)
    settings = {"total_steps": None, "decay_ratio": None, "decay_type": "linear", "min_lr_factor": 0.0, **table}
    return known["build_lr_schedulers"](None, types.SimpleNamespace(**settings), steps)


TRAIN = {"lr": 4e-4, "min_lr": 4e-5, "warmup_steps": 20, "steps": 200}


@pytest.mark.parametrize(
    "train",
    [
        {},
        TRAIN,
        {**TRAIN, "schedule": "linear", "warmup_steps": 0},
        {**TRAIN, "schedule": "constant"},
        {**TRAIN, "schedule": "wsd", "decay_steps": 60},
        {**TRAIN, "schedule": "wsd"},
        {**TRAIN, "schedule_steps": 300},
    ],
)
def test_schedule_that_we_write_is_ours_in_its_words(train: dict[str, Any]) -> None:
    run = RunConfig.model_validate({"train": train, "checkpoint": {"dir": "out"}})
    made = plan("llama3.1-8b", "16xh200", sequence_length=1024, global_batch=64, strategy="zero=3", micro_batch=1)
    found = tomllib.loads(torchtitan_file(made, Carried(run, "run.toml")))
    check(found, "JobConfig", classes())
    share = multipliers(found["lr_scheduler"], found["training"]["steps"])
    for step in range(run.train.steps):
        wanted = learning_rate(run.train, step)
        assert found["optimizer"]["lr"] * share(step) == pytest.approx(wanted, abs=0.02 * run.train.lr), step


def test_it_has_the_models_that_we_name() -> None:
    for model, flavor in FLAVORS.values():
        assert f'"{flavor}": ' in source(f"torchtitan/models/{model}/__init__.py")
