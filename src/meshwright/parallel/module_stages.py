"""Run any module as the stages of a pipeline: its own forward pass, over the units of one stage at a time.

    units          embed    blocks.0    blocks.1 |  blocks.2    blocks.3    norm    head
    stage 0        runs     runs        runs     |  takes what comes, and the pass ends
    stage 1        gives nothing that is a number|  is given what came instead, runs ...

Units of other ranks are taken out of the module (None in their place), so names survive. While a stage runs, others
take their places: those before it give tensors of the right shape that are not numbers, the first of the next stage
keeps what it is called with. So code between units runs on the earlier stage, and what a model computes for all of its
layers (masks, rotations) on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.errors import ConfigError
from meshwright.models.reads import around_forward
from meshwright.parallel.dry_run import DryRun, Passage
from meshwright.parallel.pipeline import Call
from meshwright.parallel.pipeline_units import Unit, units_in_order
from meshwright.parallel.precision import Precision
from meshwright.schedules import splits_backward
from meshwright.strategy import Strategy
from meshwright.torch_private import parameters_of


class _Border(BaseException):
    """Leaves the model's forward pass with what goes to the next stage; no handler of the model's own takes it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@dataclass
class _Pass:
    """The forward pass in hand: of the units from `start` to before `stop`."""

    passages: list[Passage]
    start: int
    stop: int
    hidden: Tensor | None
    entered: bool = False
    """Whether the first unit has taken what came."""
    left: bool = False
    """Whether the next stage's first unit was reached."""


class ModuleStages:
    """A module with a pipeline plan, run one stage at a time."""

    def __init__(self, model: nn.Module, strategy: Strategy, policy: Precision) -> None:
        units = units_in_order(model)
        self.layers = units.cut(strategy)
        starts = units.starts(self.layers)
        self.shared = units.shared(starts)
        self.everywhere = units.outside(model)
        self._bounds = [*starts, len(units.all)]
        self._first_layer = units.layers.start
        self._model = model
        self._kind = type(model).__name__
        self._slots = [_Slot(unit, partial(self._answer, place)) for place, unit in enumerate(units.all)]
        borders = set(starts) - {0}
        if splits_backward(strategy.schedule):
            # There the first stage's backward pass is cut as well.
            borders |= {self._first_layer} - {0}
        self._dry_run = DryRun(model, units.names, units.layers, borders, policy)
        self._pass: _Pass | None = None
        around_forward(model, self._forward)

    @property
    def first_layer(self) -> nn.Module | None:
        """The first of all layers, where it is on this rank."""
        return self._slots[self._first_layer].unit

    def keep(self, stages: Sequence[int]) -> None:
        """Take the units of other stages than these out of the model; of a unit that shares parameters with one that
        stays, these are left."""
        own = [slot for stage in stages for slot in self._of(stage)]
        used = {parameter for slot in own for parameter in slot.parameters()}
        for slot in self._slots:
            if slot not in own:
                slot.clear(used)

    def run(self, stage: int, call: Call, hidden: Tensor | None) -> Any:
        """The model's own forward pass, over the units of one stage."""
        self._pass = _Pass(self._dry_run.passages(call), self._bounds[stage], self._bounds[stage + 1], hidden)
        try:
            return self._model(*call.inputs, **call.options)
        finally:
            self._pass = None

    def border(self, stage: int, call: Call) -> Tensor:
        """An empty tensor like what the first unit of the next stage is given."""
        like = self._dry_run.passages(call)[self._bounds[stage + 1]].like
        assert like is not None
        return like.empty()

    def blocks(self, blocks: Sequence[nn.Module], stages: Sequence[int]) -> list[list[nn.Module]]:
        """Of all layers those that are inside of the units of these stages."""
        return [
            [block for block in blocks if any(block in slot.modules() for slot in self._of(stage))] for stage in stages
        ]

    def check_wrapped(self, modules: Sequence[nn.Module], wrap: str) -> None:
        """Refuse to gather together what is on several stages."""
        inside = {module for slot in self._slots for module in slot.modules()}
        for module in modules:
            if module not in inside and any(below in inside for below in module.modules()):
                raise ConfigError(
                    f"wrap={wrap} gathers a {type(module).__name__} as a whole, and pp cuts it into stages; "
                    "use wrap=block, or name modules inside of the units of the model's pipeline_plan"
                )

    def _of(self, stage: int) -> list[_Slot]:
        return self._slots[self._bounds[stage] : self._bounds[stage + 1]]

    def _forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """The forward pass of the model, with seats for other stages; inside of the model's hooks, which look for its
        modules and find all that are on this rank."""
        now = self._pass
        if now is None:
            raise ValueError("a rank of a pipeline cannot be called by itself; parallel.passes and its kin call it")
        seated = [slot for place, slot in enumerate(self._slots) if place <= now.start or place == now.stop]
        try:
            for slot in seated if now.hidden is not None else seated[1:]:
                slot.parent._modules[slot.key] = slot.seat
            output = forward(*inputs, **options)
        except _Border as border:
            output, now.left = border.value, True
        finally:
            for slot in seated:
                slot.parent._modules[slot.key] = slot.kept
        if now.entered != (now.hidden is not None) or now.left != (now.stop < len(self._slots)):
            place = now.start if now.left == (now.stop < len(self._slots)) else now.stop
            raise ConfigError(
                f"{self._kind} did not call {self._slots[place].name} in this pass, as it did in a run without "
                "memory: under pp every pass goes through all units; switch off what drops layers, or use pp=1"
            )
        return output

    def _answer(self, place: int, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a seat says for its unit."""
        now = self._pass
        assert now is not None
        passage = now.passages[place]
        if not passage.called:
            raise ConfigError(
                f"{self._kind} calls {self._slots[place].name} in this pass, and in a run without memory it did not: "
                "under pp every pass goes through the same units; mend it, or use pp=1"
            )
        if place < now.start:
            return passage.stand_in()
        leaves, form = tree_flatten((inputs, options))
        if place == now.stop:
            value = leaves[passage.carried[0]]
            self._check_border(place, value, passage)
            raise _Border(value)
        unit, hidden, now.entered = self._slots[place].unit, now.hidden, True
        assert unit is not None
        given = [hidden if index in passage.carried else leaf for index, leaf in enumerate(leaves)]
        inputs, options = tree_unflatten(given, form)
        return unit(*inputs, **options)

    def _check_border(self, place: int, value: Any, passage: Passage) -> None:
        like = passage.like
        assert like is not None
        if value.shape != like.shape or value.dtype != like.dtype:
            found, expected = (f"{tuple(one.shape)} in {one.dtype}" for one in (value, like))
            raise ConfigError(
                f"{self._slots[place].name} of {self._kind} is given {found} and was expected to be given {expected}: "
                "under pp what goes from stage to stage must follow from the shape of the batch; mend it, or use pp=1"
            )


class _Slot:
    """The place of a unit in a model, and what sits there while other stages run."""

    def __init__(self, unit: Unit, answer: Callable[..., Any]) -> None:
        self.name, self.parent, self.key = unit.name, unit.parent, unit.key
        self.unit: nn.Module | None = unit.module
        """The unit, where it is on this rank."""
        self.kept: nn.Module | None = unit.module
        """What is there between the passes: of a unit of another rank nothing, or what shares parameters."""
        self.seat = _Seat(self, answer)

    def modules(self) -> set[nn.Module]:
        """Of the unit, where it is on this rank."""
        return set(self.unit.modules()) if self.unit is not None else set()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the unit, where it is on this rank."""
        return self.unit.parameters() if self.unit is not None else iter(())

    def clear(self, used: set[nn.Parameter]) -> None:
        """Take the unit out of the model, but for parameters that are used elsewhere."""
        assert self.unit is not None
        if used.isdisjoint(self.unit.parameters()):
            self.kept = None
        else:
            for module in self.unit.modules():
                held = parameters_of(module)
                held.update({name: None for name, value in held.items() if value not in used})
                module._buffers.update(dict.fromkeys(module._buffers))
        self.unit = None
        self.parent._modules[self.key] = self.kept


class _Seat(nn.Module):
    """Sits in the place of a unit; has its plain attributes, which a model's code may ask for."""

    def __init__(self, slot: _Slot, answer: Callable[..., Any]) -> None:
        super().__init__()
        assert slot.unit is not None
        plain = {name: value for name, value in vars(slot.unit).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if name not in ("forward", "training")})
        self.__dict__.update(_slot=slot, _answer=answer)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self._answer(inputs, options)

    def __getattr__(self, name: str) -> Any:
        slot = self.__dict__["_slot"]
        if slot.unit is None:
            raise AttributeError(f"{slot.name} is on another stage of the pipeline, and its '{name}' is not here")
        return getattr(slot.unit, name)
