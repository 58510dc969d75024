"""Which modules of a model hold experts, and how these are called: what expert parallel deals out.

A model says so in an attribute `expert_plan`: name patterns of modules whose parameters have the expert as their first
dimension. A model of transformers says it in its own `ep_plan`. There are two ways to call such a module:

    rows       experts(x_RC, counts_E): rows grouped by expert, counts[e] of them each; gives a row for each
    choices    experts(x_NC, index_NK, weights_NK): the weighted sum of what each token's K chosen experts give

Which one it is follows from the number of arguments of its forward pass, unless the plan is a table that says so
(pattern -> word).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.reads import kind_of
from meshwright.models.tensor_plan import entry_of

_CALLS = {2: "rows", 3: "choices"}
"""By the number of arguments."""


class Experts(NamedTuple):
    """A module that holds experts."""

    name: str
    module: nn.Module
    call: str


def experts_of(model: nn.Module) -> list[Experts]:
    """The modules of a model that hold experts, in order, before data parallel has wrapped them."""
    plan = plan_of(model)
    return [
        Experts(name, module, entry_of(plan, name) or call_of(name, module))
        for name, module in holders_of(model).items()
    ]


def holders_of(model: nn.Module) -> dict[str, nn.Module]:
    """The same modules by name, at any time."""
    plan = plan_of(model)
    return {name: module for name, module in model.named_modules() if entry_of(plan, name) is not None}


def plan_of(model: nn.Module) -> dict[str, str]:
    """Patterns of modules with experts, and the word for how they are called; none where their code says it."""
    own = getattr(model, "expert_plan", None)
    if own is None:
        return dict.fromkeys(_hugging_face_modules(model), "")
    if isinstance(own, str):
        raise ConfigError(f"{type(model).__name__}.expert_plan is one text; make it a list of names of modules")
    plan = dict(own) if isinstance(own, Mapping) else dict.fromkeys(own, "")
    for pattern, word in plan.items():
        if word and word not in _CALLS.values():
            raise ConfigError(
                f"{type(model).__name__}.expert_plan says '{word}' for '{pattern}'; say {' or '.join(_CALLS.values())}"
            )
    return plan


def _hugging_face_modules(model: nn.Module) -> list[str]:
    """The modules of which a model of transformers says that some parameter is a stack of experts."""
    return list(dict.fromkeys(pattern.rpartition(".")[0] for pattern in _stacked(model)))


def _stacked(model: nn.Module) -> list[str]:
    theirs = getattr(model, "ep_plan", None)
    if not isinstance(theirs, dict) or not hasattr(model, "config"):
        return []
    return [pattern for pattern, style in theirs.items() if style == "grouped_gemm"]


def call_of(name: str, module: nn.Module) -> str:
    """How a module that holds experts is called, by its forward pass."""
    taken = list(inspect.signature(kind_of(module).forward).parameters)[1:]
    if len(taken) not in _CALLS:
        raise ConfigError(
            f"{name} is a {kind_of(module).__name__}, called with ({', '.join(taken)}), and experts are to take "
            "(rows, counts) or (hidden, index, weights); give it such a forward pass, or use ep=1"
        )
    return _CALLS[len(taken)]


def check(model: nn.Module, ep: int) -> None:
    """Raise a ConfigError unless the model has experts that can be dealt out to that many ranks."""
    kind, found = type(model).__name__, experts_of(model)
    own = getattr(model, "expert_plan", None) is not None
    for pattern in plan_of(model) if own else ():
        if not any(fnmatchcase(one.name, pattern) for one in found):
            raise ConfigError(f"{kind}.expert_plan names '{pattern}', and no module has that name; mend or remove it")
    if not found:
        raise ConfigError(
            f"ep={ep} splits experts, and {kind} has none; leave ep out, or name them in an `expert_plan` "
            "(docs/strategies.md)"
        )
    holders: dict[nn.Parameter, str] = {}
    for one in found:
        _check_module(kind, one, [] if own else _stacked(model))
        for parameter in one.module.parameters():
            if parameter in holders:
                raise ConfigError(f"{one.name} shares experts with {holders[parameter]}, which ep cannot deal out")
            holders[parameter] = one.name
        count = count_of(one.module)
        if count % ep:
            raise ConfigError(f"ep={ep} does not divide the {count} experts of {one.name}; use a divisor of them")


def count_of(module: nn.Module) -> int:
    """How many experts a module holds."""
    return next(module.parameters()).shape[0]


def _check_module(kind: str, one: Experts, stacked: list[str]) -> None:
    """Refuse what would not be cut by expert."""
    named = dict(one.module.named_parameters())
    if not named:
        raise ConfigError(f"{one.name} of {kind} is named as experts and has no parameters; mend the plan")
    count = count_of(one.module)
    for name, parameter in named.items():
        full = f"{one.name}.{name}"
        if "." in name:
            raise ConfigError(
                f"{full} of {kind} lies below its experts: ep deals out what a module itself holds, stacked; "
                "stack it, or use ep=1"
            )
        if stacked and not any(fnmatchcase(full, pattern) for pattern in stacked):
            raise ConfigError(f"{kind} does not say how ep treats {full}, which its experts hold; use ep=1")
        if not parameter.ndim or parameter.shape[0] != count:
            raise ConfigError(
                f"{full} of {kind} has shape {tuple(parameter.shape)}, and its first dimension must be the {count} "
                "experts; stack it, or use ep=1"
            )
    for name, buffer in one.module.named_buffers():
        if buffer.ndim and buffer.shape[0] == count:
            raise ConfigError(f"{one.name}.{name} of {kind} is a buffer by expert, which ep does not cut; use ep=1")
