"""What a rank holds of each unit of parameters that is gathered and reduced together; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.axis_order import AXES, Order
from meshwright.cuts import group_small, part_length
from meshwright.models.shapes import Shape, shapes_of
from meshwright.models.spec import ModelSpec
from meshwright.models.tensor_plan import Rule, cut_dimension, rule_of, tensor_plan
from meshwright.schedules import placement_of, stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Place:
    """A rank by its index along each axis."""

    pp: int = 0
    replicate: int = 0
    shard: int = 0
    cp: int = 0
    tp: int = 0

    @classmethod
    def of(cls, strategy: Strategy, rank: int, order: Order = AXES) -> Place:
        """The place of a rank where the axes lie in that order."""
        found = {}
        for axis in reversed(order):
            rank, found[axis] = divmod(rank, getattr(strategy, axis))
        return cls(**found)


FIRST = Place()


@dataclass(frozen=True)
class Held:
    """One parameter on one rank: its part under tensor and expert parallel, and the shards of that."""

    shape: Shape
    shards: int
    """Ranks that share its state."""
    index: int
    """Which of them this rank is."""

    @property
    def local(self) -> int:
        """Elements of the part."""
        return prod(self.shape)

    @property
    def shard(self) -> int:
        """Elements of this rank's shard of it."""
        return part_length(self.shape[0], self.shards, self.index) * prod(self.shape[1:])

    @property
    def padded(self) -> int:
        """Elements of a shard with its padding; the same on every rank."""
        return -(-self.shape[0] // self.shards) * prod(self.shape[1:])


Unit = dict[str, Held]


@dataclass(frozen=True)
class Units:
    """Everything that a rank holds."""

    layers: list[Unit]
    """Units of layers, in order."""
    experts: list[Unit]
    """Experts that are dealt out over data ranks, of each layer: units of their own."""
    root: Unit
    """What is in none of them."""

    def experts_of(self, unit: Unit) -> list[Unit]:
        """The experts of layers of which the rest is in that unit."""
        layers = {_layer_of(name) for name in unit}
        return [experts for experts in self.experts if _layer_of(next(iter(experts))) in layers]

    @property
    def all(self) -> list[Unit]:
        """Layers, experts, root."""
        return [*self.layers, *self.experts, self.root]


def units_of(spec: ModelSpec, strategy: Strategy, place: Place) -> Units:
    """The units of a rank."""
    if strategy.wrap not in ("auto", "block"):
        raise ValueError(f"wrap={strategy.wrap} depends on the modules of a model; closed forms know auto and block")
    stages = own_stages(spec, strategy, place)
    layers: dict[int, Unit] = {layer: {} for stage in stages for layer in stage}
    sizes = dict.fromkeys(layers, 0)
    experts: dict[int, Unit] = {}
    root: Unit = {}
    total = 0
    for name, shape in shapes_of(spec).items():
        if not _is_held(name, spec, stages, layers):
            continue
        total += prod(shape)
        held = _held(name, shape, spec, strategy, place)
        if not name.startswith("model.layers."):
            root[name] = held
            continue
        layer = _layer_of(name)
        assert layer is not None
        sizes[layer] += prod(shape)
        apart = strategy.ep > 1 and ".experts." in name
        (experts.setdefault(layer, {}) if apart else layers[layer])[name] = held
    groups = [[layer] for layer in layers]
    if strategy.wrap == "auto":
        groups = [
            [stage[index] for index in group]
            for stage in stages
            for group in group_small([sizes[layer] for layer in stage], total)
        ]
    together = [{name: held for layer in group for name, held in layers[layer].items()} for group in groups]
    if not groups:
        root = {name: held for unit in (*layers.values(), root) for name, held in unit.items()}
    return Units(together, list(experts.values()), root)


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def own_stages(spec: ModelSpec, strategy: Strategy, place: Place) -> list[range]:
    """The layers of each stage of a rank."""
    if strategy.pp == 1:
        return [range(spec.num_hidden_layers)]
    stages = stage_layers(spec, strategy.pp * stages_per_rank(strategy.schedule), strategy.layers)
    ranks = placement_of(strategy.schedule, strategy.pp)
    return [layers for layers, rank in zip(stages, ranks, strict=True) if rank == place.pp]


def _is_held(name: str, spec: ModelSpec, stages: list[range], layers: dict[int, Unit]) -> bool:
    has_first, has_last = stages[0].start == 0, stages[-1].stop == spec.num_hidden_layers
    match name.split("."):
        case ["model", "layers", layer, *_]:
            return int(layer) in layers
        case ["model", "embed_tokens", _]:
            return has_first or (has_last and spec.tie_word_embeddings)
        case ["model", "embed_positions", _]:
            return has_first
        case _:
            return has_last


def _held(name: str, shape: Shape, spec: ModelSpec, strategy: Strategy, place: Place) -> Held:
    module, _, parameter = name.rpartition(".")
    part = list(shape)
    dimension = cut_dimension(rule_for(tensor_plan(spec), module), parameter, strategy.tp)
    if dimension is not None and strategy.tp > 1:
        part[dimension] = part_length(shape[dimension], strategy.tp, place.tp)
    shards, index = strategy.shard, place.shard
    if strategy.ep > 1 and ".experts." in name:
        part[0] //= strategy.ep
        _, shards = strategy.expert_copies
        index = place.shard // strategy.ep if shards > 1 else 0
    return Held(tuple(part), shards * strategy.cp, index * strategy.cp + place.cp)


def rule_for(plan: dict[str, str], module: str) -> Rule:
    """The rule of a module that has one."""
    rule = rule_of(plan, module)
    assert rule is not None, module
    return rule
