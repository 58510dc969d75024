"""The parts of a model that a pipeline deals out: modules in the order in which the forward pass calls them.

The model brings the plan (`pipeline_plan`: patterns of names, in order). The members of its longest pattern are the
layers, which a strategy counts; what comes before them goes with the first, what comes after with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.hf_pipeline_plan import hugging_face_pipeline_plan
from meshwright.parallel.pipeline import Shared
from meshwright.schedules import placement_of, stages_per_rank
from meshwright.stages import cut_layers
from meshwright.strategy import Strategy
from meshwright.strategy_fit import check_stages
from meshwright.torch_private import parameters_of


@dataclass(frozen=True)
class Unit:
    """A module that is on one stage as a whole."""

    name: str
    module: nn.Module
    parent: nn.Module
    """Whose child it is, under `key`."""
    key: str


@dataclass(frozen=True)
class Units:
    """The units of a model, in order, and which of them are its layers."""

    all: list[Unit]
    layers: range

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [unit.name for unit in self.all]

    def starts(self, layers: Sequence[range]) -> list[int]:
        """The first unit of each stage that has these layers; the first stage begins with what is before them."""
        return [0, *(self.layers.start + stage.start for stage in layers[1:])]

    def cut(self, strategy: Strategy) -> list[range]:
        """The layers of each stage."""
        stages = strategy.pp * stages_per_rank(strategy.schedule)
        return cut_layers(len(self.layers), stages, strategy.layers, self._costs)

    def shared(self, starts: Sequence[int]) -> list[Shared]:
        """The parameters that several stages use, by the first of their names."""
        users: dict[nn.Parameter, tuple[str, dict[int, None]]] = {}
        for place, unit in enumerate(self.all):
            stage = sum(start <= place for start in starts) - 1
            for name, parameter in unit.module.named_parameters():
                users.setdefault(parameter, (f"{unit.name}.{name}", {}))[1][stage] = None
        return [Shared(name, tuple(stages)) for name, stages in users.values() if len(stages) > 1]

    def outside(self, model: nn.Module) -> set[str]:
        """Modules that are in no unit and around none."""
        inside = {module for unit in self.all for module in unit.module.modules()}
        around = {module for module in model.modules() if any(unit.parent in module.modules() for unit in self.all)}
        return {name for name, module in model.named_modules() if module not in inside | around}

    def _costs(self) -> list[float]:
        """What each layer costs a sample: the elements of its parameters, of embeddings the rows that it looks up."""
        found = [0.0] * len(self.layers)
        for place, unit in enumerate(self.all):
            layer = min(max(place - self.layers.start, 0), len(found) - 1)
            for module in unit.module.modules():
                own = [parameter for parameter in parameters_of(module).values() if parameter is not None]
                lookup = isinstance(module, nn.Embedding)
                found[layer] += sum(value.shape[-1] if lookup and value.ndim else value.numel() for value in own)
        return found


def units_in_order(model: nn.Module) -> Units:
    """The units that a model's plan names; refuses a plan that does not cover its parameters."""
    kind = type(model).__name__
    plan = pipeline_plan(model)
    if plan is None:
        raise ConfigError(
            f"pp needs to know in which order {kind} calls its parts: give the class a `pipeline_plan` (patterns of "
            "module names in that order; docs/strategies.md has an example), or use pp=1 with zero=3 or tp"
        )
    modules = {name: module for name, module in model.named_modules() if name}
    fitting = {name for name in modules if any(fnmatchcase(name, pattern) for pattern in plan)}
    taken: dict[str, None] = {}
    runs: list[range] = []
    for pattern in plan:
        named = [name for name in modules if fnmatchcase(name, pattern)]
        own = [name for name in named if name not in taken and not _inside(name, fitting)]
        if not own:
            why = f"{named[0]} is in another unit" if named else "no module of that name"
            raise ConfigError(f"{kind}.pipeline_plan has '{pattern}', and {why}; mend or remove it")
        runs.append(range(len(taken), len(taken) + len(own)))
        taken |= dict.fromkeys(own)
    for name, _ in model.named_parameters():
        if not _inside(name, taken):
            raise ConfigError(
                f"no pattern of {kind}.pipeline_plan covers the parameter {name}: all stages would have it; "
                "name its module there, at the end if no pass calls it, or use pp=1"
            )
    return Units([_unit(model, name) for name in taken], max(runs, key=len))


def check(model: nn.Module, strategy: Strategy) -> None:
    """Raise a ConfigError unless the model can be cut into that many stages."""
    units = units_in_order(model)
    check_stages(strategy, len(units.layers))
    if strategy.cp > 1:
        raise ConfigError(f"pp={strategy.pp} with cp={strategy.cp} is for Meshwright's own decoder; use cp=1 or pp=1")
    regions = "region" in (getattr(model, "tensor_plan", None) or {}).values()
    if strategy.tp > 1 and strategy.sp and regions:
        raise ConfigError(
            f"pp={strategy.pp}: between the stages of {type(model).__name__} there are whole sequences; use sp=off"
        )
    placement = placement_of(strategy.schedule, strategy.pp)
    for name, stages in units.shared(units.starts(units.cut(strategy))):
        if len({placement[stage] for stage in stages}) > 2:
            raise ConfigError(
                f"{name} is shared by stages on more than two ranks (stages {', '.join(map(str, stages))}); "
                "let the layers in between have parameters of their own, or use pp=2"
            )


def pipeline_plan(model: nn.Module) -> tuple[str, ...] | None:
    """The model's own plan, or the one that follows from what a Hugging Face model says of itself."""
    own: Sequence[str] | None = getattr(model, "pipeline_plan", None)
    return tuple(own) if own is not None else hugging_face_pipeline_plan(model)


def _inside(name: str, units: dict[str, None] | set[str]) -> bool:
    """Whether it is the name of something within one of these."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in units for depth in range(1, len(parts)))


def _unit(model: nn.Module, name: str) -> Unit:
    above, _, key = name.rpartition(".")
    return Unit(name, model.get_submodule(name), model.get_submodule(above), key)
