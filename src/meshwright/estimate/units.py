"""What a rank holds of each unit of parameters that is gathered and reduced together; no torch."""

from __future__ import annotations

from math import prod

from meshwright.cuts import group_small, part_length
from meshwright.models.shapes import Shape, shapes_of
from meshwright.models.spec import ModelSpec
from meshwright.models.tensor_plan import Rule, cut_dimension, rule_of, tensor_plan
from meshwright.strategy import Strategy

Unit = dict[str, Shape]
"""Names of parameters and the shapes of this rank's parts, before they are sharded."""


def check_known(strategy: Strategy) -> None:
    """Raise a ValueError for what the closed forms do not know yet."""
    if strategy.cp > 1:
        raise ValueError(f"closed forms know no cp yet, and this strategy is '{strategy}'")


def units_of(spec: ModelSpec, strategy: Strategy, tp_rank: int) -> tuple[list[Unit], Unit]:
    """The units of layers in order, and the root: what is in none of them."""
    if strategy.wrap not in ("auto", "block"):
        raise ValueError(f"wrap={strategy.wrap} depends on the modules of a model; closed forms know auto and block")
    plan, layers = tensor_plan(spec), [Unit() for _ in range(spec.num_hidden_layers)]
    root, sizes = Unit(), [0] * spec.num_hidden_layers
    for name, shape in shapes_of(spec).items():
        module, _, parameter = name.rpartition(".")
        part = list(shape)
        dimension = cut_dimension(rule_for(plan, module), parameter, strategy.tp)
        if dimension is not None and strategy.tp > 1:
            part[dimension] = part_length(shape[dimension], strategy.tp, tp_rank)
        if name.startswith("model.layers."):
            layer = int(name.split(".")[2])
            layers[layer][name] = tuple(part)
            sizes[layer] += prod(shape)
        else:
            root[name] = tuple(part)
    groups = [[layer] for layer in range(len(layers))]
    if strategy.wrap == "auto":
        groups = group_small(sizes, sum(map(prod, shapes_of(spec).values())))
    if not groups:
        return [], {name: shape for unit in (*layers, root) for name, shape in unit.items()}
    return [{name: shape for layer in group for name, shape in layers[layer].items()} for group in groups], root


def rule_for(plan: dict[str, str], module: str) -> Rule:
    """The rule of a module that has one."""
    rule = rule_of(plan, module)
    assert rule is not None, module
    return rule
