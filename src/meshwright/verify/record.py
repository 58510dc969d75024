"""What happens inside a step on one rank: outputs of modules, their gradients, gradients of parameters, as arrays.

Nothing is gathered here. Each array says where in the whole it lies, or the rank's place says it; who compares has
the records of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshwright.models.expert_plan import holders_of
from meshwright.models.parts import box_of, unpacked
from meshwright.models.tensor_plan import rule_of
from meshwright.parallel.model import SplitModel
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.units import blocks_of

Array = NDArray[Any]


class Part(NamedTuple):
    """A part of a tensor: its values, and where they lie in the whole; a packed dimension is seen as two."""

    values: Array
    offset: tuple[int, ...]
    whole: tuple[int, ...]


class Call(NamedTuple):
    """One call of a module in a step."""

    micro_step: int
    module: str
    turn: int
    """0 unless the module is called several times in one forward pass."""


class Place(NamedTuple):
    """Where a rank stands among those that split samples (data), sequences (cp) and matrices (tp)."""

    data_rank: int = 0
    dp: int = 1
    cp_rank: int = 0
    cp: int = 1
    cp_method: str = "ring"
    tp_rank: int = 0
    tp: int = 1
    shares: tuple[int, ...] = ()
    """Of each data rank in the samples; none stand for equal ones."""


@dataclass
class StepTrace:
    """All that was recorded of one step on one rank."""

    place: Place = field(default_factory=Place)
    length: int = 0
    """Tokens of the sequences that went into the model."""
    outputs: dict[Call, Part] = field(default_factory=dict)
    """In the order in which the modules ended."""
    gradients: dict[Call, Part] = field(default_factory=dict)
    """Of the outputs."""
    parameter_gradients: dict[str, Part] = field(default_factory=dict)
    """After all sums over ranks, before clipping."""
    rules: dict[str, str] = field(default_factory=dict)
    """The word of the model's table for each module; none where it has no row."""
    within: frozenset[str] = frozenset()
    """The modules inside a region."""


class Recorder:
    """Hooks on every module of a model that record while `active`."""

    def __init__(self, model: nn.Module, pipeline: Pipeline | None = None) -> None:
        self.active = False
        self._pipeline = pipeline
        self._ends = True
        self._inside = False
        self._micro_step = -1
        self._calls: Counter[str] = Counter()
        rules = rules_of(model)
        self._trace = StepTrace(rules=rules, within=frozenset(name for name in rules if _is_within(name, rules)))
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            module.register_forward_hook(self._end(name))
        blocks = set(blocks_of(model))
        inside = {name: set(module.modules()) for name, module in model.named_modules() if module not in blocks}
        self._around_layers = {name for name, below in inside.items() if blocks & below}
        self._everywhere = pipeline.cut.everywhere if pipeline is not None else set()

    def take_gradients(self, model: nn.Module) -> None:
        """Record the gradients of the parameters, if this is the step."""
        if self.active:
            named = model.named_parameters(remove_duplicate=False)
            self._trace.parameter_gradients = parts_of((n, p.grad) for n, p in named if p.grad is not None)

    def trace(self, place: Place, clipped: float) -> StepTrace:
        """What was recorded; gradients of parameters are divided by the factor of their clipping."""
        found = self._trace
        found.place = place
        for name, part in found.parameter_gradients.items():
            found.parameter_gradients[name] = part._replace(values=part.values / clipped)
        return found

    def _begin(self, _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self.active:
            return
        self._inside = True
        self._micro_step += 1
        self._calls.clear()
        tokens = next((x for x in (*inputs, *options.values()) if isinstance(x, Tensor)), None)
        if tokens is not None and not tokens.is_floating_point() and tokens.ndim > 1:
            self._trace.length = tokens.shape[1]
        if self._pipeline is not None:
            self._micro_step, stage = self._pipeline.in_hand
            self._ends = stage == len(self._pipeline.placement) - 1

    def _end(self, name: str) -> Any:
        def hook(_: nn.Module, __: object, output: Any) -> None:
            # What runs outside of a forward pass of the model is one that is computed again.
            if not (self.active and self._inside):
                return
            if not name:
                self._inside = False
            if name in self._everywhere or (not self._ends and name in self._around_layers):
                # What goes to the next stage is not what comes out of this module on one device.
                return
            call = Call(self._micro_step, name, self._calls[name])
            self._calls[name] += 1
            tensor = _tensor_of(output)
            if tensor is None:
                return
            self._trace.outputs[call] = _part(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._keep(call, gradient))

        return hook

    def _keep(self, call: Call, gradient: Tensor) -> None:
        self._trace.gradients[call] = _part(gradient)


def rules_of(model: nn.Module) -> dict[str, str]:
    """The word of the model's table for each of its modules; that of experts for what holds such, and all in it."""
    plan = getattr(model, "tensor_plan", None) or {}
    found = {name: rule_of(plan, name) for name, _ in model.named_modules()}
    words = {name: rule.word if rule is not None else "" for name, rule in found.items()}
    experts = {module for holder in holders_of(model).values() for module in holder.modules()}
    return words | {name: "experts" for name, module in model.named_modules() if module in experts}


def _is_within(name: str, rules: dict[str, str]) -> bool:
    above = name.split(".")
    return any(rules.get(".".join(above[:depth])) == "region" for depth in range(1, len(above)))


def held(model: nn.Module) -> dict[str, Part]:
    """What this rank holds of a model's parameters and buffers; a shared one has an entry under each of its names."""
    return parts_of((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))


def parts_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Part]:
    """Tensors as arrays that know their place in the whole."""
    return {name: _part(value) for name, value in named}


@torch.no_grad()
def _part(value: Tensor) -> Part:
    local, offset, whole = box_of(unpacked(value.detach()))
    return Part(local.cpu().double().numpy().copy(), tuple(offset), tuple(whole))


def _tensor_of(output: Any) -> Tensor | None:
    """The tensor of numbers that a module gives, alone or first in a tuple."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.ndim else None


def place_of(parallel: SplitModel) -> Place:
    """Where this rank stands."""
    mesh, strategy = parallel.mesh, parallel.strategy
    if mesh is None:
        return Place()
    cp_rank, tp_rank = mesh["cp"].get_local_rank(), mesh["tp"].get_local_rank()
    return Place(
        parallel.data_rank,
        strategy.dp,
        cp_rank,
        strategy.cp,
        strategy.cp_method,
        tp_rank,
        strategy.tp,
        strategy.data_shares,
    )
