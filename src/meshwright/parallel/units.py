"""Which modules are gathered, reduced and recomputed together: the layers of a model, or what the user says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from meshwright.cuts import SMALL_UNIT, group_small
from meshwright.errors import ConfigError
from meshwright.models.parts import local_of
from meshwright.torch_private import parameters_of


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the members of its outermost list or dictionary of modules of one kind, the longest."""
    found: list[tuple[int, list[nn.Module]]] = []
    for path, module in model.named_modules():
        members = list(module.children())
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and len({type(member) for member in members}) == 1:
            found.append((path.count("."), members))
    outermost = min((depth for depth, _ in found), default=0)
    return max((members for depth, members in found if depth == outermost), key=len, default=[])


def units_of(
    model: nn.Module,
    wrap: str,
    stages: Sequence[list[nn.Module]] | None = None,
    least: int = SMALL_UNIT,
    shared: set[nn.Module] | None = None,
) -> list[list[nn.Module]]:
    """The modules that are wrapped together, inner ones first; the rest goes with the root. With wrap=auto layers are
    together until they have `least` parameters.

    A parameter that several modules share belongs to none of them alone, and goes with the root: of a model that is
    split already, `shared` are the modules that held such before. Layers of different pipeline stages, which `stages`
    lists, run at different times and are not wrapped together.
    """
    kind, _, argument = wrap.partition(":")
    shared = holders_of_shared(model) if shared is None else shared
    if kind == "name":
        return [[module] for module in _named(model, argument.split("+"), shared, may_miss=stages is not None)]
    if kind == "size":
        return [[module] for module in _sized(model, int(argument), shared)]
    runs = [[block for block in run if block not in shared] for run in stages or [blocks_of(model)]]
    if kind == "block":
        return [[block] for run in runs for block in run]
    total = own_size(model)
    units = []
    for run in runs:
        sizes = [own_size(block) for block in run]
        units += [[run[index] for index in group] for group in group_small(sizes, total, least)]
    return units


def own_size(module: nn.Module) -> int:
    """Numbers that this rank holds of a module's parameters."""
    return sum(local_of(parameter).numel() for parameter in module.parameters())


def holders_of_shared(model: nn.Module) -> set[nn.Module]:
    """Modules that hold, themselves or below, a parameter which another module holds as well."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(module)
    several = {module for held in holders.values() if len(held) > 1 for module in held}
    # A module that stands in several places counts as well.
    places = Counter(child for module in model.modules() for child in module.children())
    several |= {module for module, count in places.items() if count > 1}
    return {module for module in model.modules() if any(below in several for below in module.modules())}


def _named(model: nn.Module, names: list[str], shared: set[nn.Module], may_miss: bool) -> list[nn.Module]:
    """Modules of those names or paths; of a list of modules, which is not called itself, its members.

    A pipeline rank `may_miss` some, which others have.
    """
    found: dict[nn.Module, None] = {}
    unknown = set(names)
    for path, module in model.named_modules():
        fitting = {name for name in names if path and name in (path.split(".")[-1], path)}
        if fitting:
            unknown -= fitting
            members = module.children() if isinstance(module, nn.ModuleList | nn.ModuleDict) else [module]
            found |= dict.fromkeys(member for member in members if member not in shared)
    if unknown and not may_miss:
        first = next(name for name in names if name in unknown)
        raise ConfigError(f"wrap=name:{'+'.join(names)}: {type(model).__name__} has no module '{first}'")
    # Inner ones first: they come after what they are in.
    order = {module: place for place, module in enumerate(model.modules())}
    return sorted(found, key=lambda module: -order[module])


def _sized(model: nn.Module, least: int, shared: set[nn.Module]) -> list[nn.Module]:
    """Modules that hold at least that many parameters which no wrapped module below them holds."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(visit(child) for child in module.children())
        left += sum(parameter.numel() for parameter in parameters_of(module).values() if parameter is not None)
        callable_ = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if left >= least and callable_ and module is not model and module not in shared:
            units.append(module)
            return 0
        return left

    visit(model)
    return units
