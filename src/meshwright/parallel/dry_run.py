"""What goes from one unit of a model to the next: its shape, and whether it is all that goes there.

Found by running a copy of the whole model on tensors without memory, once for each shape of batch. Each unit's output
is cut off from what made it and marked, so that whatever depends on it by another way than from unit to unit is seen
and refused by name: a stage would not have it. A layer that cannot run so, because it depends on the content of tensors
as some mixtures of experts do, is taken to give a tensor like the one it is given; where it does not, the pass that
sends it on says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from meshwright.errors import ConfigError
from meshwright.parallel import router_losses
from meshwright.parallel.pipeline import Call, is_number
from meshwright.parallel.precision import Precision
from meshwright.torch_private import FakeTensorMode, parameters_of, quiet_fake_tensors

KEPT = 16
"""Shapes of batches that are remembered."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Like:
    """A tensor without its content."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def placeholder(self) -> Tensor:
        """A tensor like it that is not a number anywhere: what is computed from it is loudly wrong."""
        nothing = float("nan") if self.dtype.is_floating_point else torch.iinfo(self.dtype).min
        return torch.full(self.shape, nothing, dtype=self.dtype, device=self.device)


@dataclass
class Passage:
    """What one unit takes and gives for one shape of batch."""

    carried: tuple[int, ...]
    """Which of its arguments, flattened, are what the units before it have made."""
    like: Like | None
    """That argument; None where nothing is."""
    output: Any = None
    """What it gives: a tree with `Like` in the place of tensors."""
    placeholder: Any = None
    called: bool = True
    """Whether the pass calls it at all."""

    def stand_in(self) -> Any:
        """Something like what it gives, and not a number."""
        if self.placeholder is None:
            self.placeholder = tree_map_only(Like, Like.placeholder, self.output)
        # Code that works in place must not leave its graph here.
        return tree_map_only(Tensor, Tensor.detach, self.placeholder)


@dataclass
class _Run:
    """One forward pass on tensors without memory."""

    passages: list[Passage] = field(default_factory=list)
    marked: dict[int, int] = field(default_factory=dict)
    """From the identity of a marked output to its unit."""
    held: list[Tensor] = field(default_factory=list)
    guessed: str = ""
    """The first layer that could not run so, and why, in words."""

    def origins(self, value: Any) -> set[int]:
        """The units whose outputs a tensor depends on, as far as gradients flow."""
        found: set[int] = set()
        nodes = [value.grad_fn] if isinstance(value, Tensor) and value.grad_fn is not None else []
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable") and id(node.variable) in self.marked:
                found.add(self.marked[id(node.variable)])
            following = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= following
            nodes += following
        return found

    def mark(self, value: Tensor, unit: int) -> Tensor:
        """The output of a unit, cut off from what made it."""
        if not is_number(value):
            return value
        leaf = value.detach().requires_grad_()
        self.marked[id(leaf)] = unit
        self.held.append(leaf)
        # A copy: code may write into what a unit gives, and not into a leaf.
        return leaf.clone()


class DryRun:
    """A copy of a model, without memory, that says what goes from unit to unit."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], layers: range, starts: Iterable[int], policy: Precision
    ) -> None:
        self._kind = type(model).__name__
        self._names = list(names)
        self._starts = sorted(starts)
        """Units before which the model is cut."""
        # As it is evaluated: what a model drops at random in training, it decides by numbers.
        self._model = _without_memory(model, policy).eval()
        self._found: dict[Any, list[Passage]] = {}
        self._run = _Run()
        for place, name in enumerate(names):
            unit = self._model.get_submodule(name)
            if place in layers:
                unit.forward = partial(self._or_like_its_input, name, unit.forward)
            unit.register_forward_pre_hook(self._before(place), with_kwargs=True)
            unit.register_forward_hook(self._after(place))

    def passages(self, call: Call) -> list[Passage]:
        """Of each unit, for a batch of that shape."""
        key = self._key(call)
        if key not in self._found:
            while len(self._found) >= KEPT:
                del self._found[next(iter(self._found))]
            self._found[key] = self._passages(call)
        return self._found[key]

    def _key(self, call: Call) -> Any:
        leaves, form = tree_flatten((call.inputs, dict(call.options)))
        kind = call.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return str(form), cast, tuple(_plain(leaf) for leaf in leaves)

    def _passages(self, call: Call) -> list[Passage]:
        router_losses.check_stages(self._kind, self._model, call.options)
        self._run = _Run()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with quiet_fake_tensors(), torch.inference_mode(False), torch.enable_grad(), mode:
                _move(self._model, call.device)
                inputs, options = tree_map_only(Tensor, torch.empty_like, (call.inputs, dict(call.options)))
                output = self._model(*inputs, **options)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"pp runs {self._kind} once without memory, to learn what goes from stage to stage, and it ended in "
                f"{_told(error)}. {self._run.guessed}Its forward pass must not depend on the content of tensors; "
                "mend it, or use pp=1"
            ) from error
        self._leave_out(len(self._names))
        run, self._run = self._run, _Run()
        last = self._starts[-1] if self._starts else 0
        for value in tree_leaves(output):
            self._refuse_from_before(run, value, last, "the output")
        return run.passages

    def _before(self, place: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            run, name = self._run, self._names[place]
            if place < len(run.passages) and run.passages[place].called:
                raise ConfigError(
                    f"{self._kind} calls {name} a second time in one forward pass; a stage has its turn once: put "
                    "both calls inside of one unit, or use pp=1"
                )
            if place < len(run.passages):
                early = next(later for later in range(place, len(run.passages)) if run.passages[later].called)
                raise ConfigError(
                    f"{self._kind} calls {self._names[early]} before {name}, and its pipeline_plan has them the other "
                    "way round; let the plan follow the forward pass (model.pipeline_plan = ...)"
                )
            self._leave_out(place)
            leaves = tree_leaves((inputs, options))
            from_before = {index: origins for index, leaf in enumerate(leaves) if (origins := run.origins(leaf))}
            begins = place in self._starts
            start = max((start for start in self._starts if start < place + (not begins)), default=0)
            for index in from_before:
                self._refuse_from_before(run, leaves[index], start, name)
            distinct = {id(leaves[index]) for index in from_before}
            if begins and len(distinct) != 1:
                raise ConfigError(
                    f"a stage begins with {name} of {self._kind}, which takes {len(distinct)} tensors from the units "
                    "before it; one can travel: give it the others inside of one tensor, or cut elsewhere (layers=A+B)"
                )
            carried = leaves[next(iter(from_before))] if len(distinct) == 1 else None
            like = Like(carried.shape, carried.dtype, carried.device) if carried is not None else None
            run.passages.append(Passage(tuple(from_before), like))

        return hook

    def _leave_out(self, until: int) -> None:
        """No pass uses the units up to that one: they are on a stage and have no turn; unless it begins with one."""
        for place in range(len(self._run.passages), until):
            if place in self._starts:
                raise ConfigError(
                    f"{self._kind} does not call {self._names[place]}, with which a stage begins, at its place in the "
                    "pipeline_plan; let the plan follow the forward pass, with what no pass calls at its end"
                )
            self._run.passages.append(Passage((), None, called=False))

    def _after(self, place: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            run = self._run
            run.passages[place].output = tree_map(lambda leaf: self._like(place, leaf), output)
            return tree_map_only(Tensor, lambda leaf: run.mark(leaf, place), output)

        return hook

    def _or_like_its_input(self, name: str, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        try:
            return forward(*inputs, **options)
        except Exception as error:
            given = next((leaf for leaf in tree_leaves((inputs, options)) if is_number(leaf)), None)
            if given is None:
                raise
            self._run.guessed = self._run.guessed or (
                f"Before, {name} ended in {_told(error)}, and was taken to give one tensor like the one it is given. "
            )
            return torch.empty_like(given)

    def _like(self, place: int, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype != torch.bool:
            return Like(leaf.shape, leaf.dtype, leaf.device)
        if isinstance(leaf, _PLAIN):
            return leaf
        raise ConfigError(
            f"{self._names[place]} of {self._kind} gives a {type(leaf).__name__}, for which other stages can have no "
            "stand-in; let it give tensors of numbers, or use pp=1"
        )

    def _refuse_from_before(self, run: _Run, value: Any, start: int, who: str) -> None:
        """Refuse what depends on the output of a unit of an earlier stage other than by what that stage sends."""
        early = [origin for origin in run.origins(value) if origin < start]
        if early:
            raise ConfigError(
                f"{who} of {self._kind} uses what {self._names[max(early)]} gave, and a stage begins at "
                f"{self._names[start]} in between, to which one tensor travels; let each unit take all that it needs "
                "from the one before it (a residual belongs inside of the unit), or cut elsewhere (layers=A+B)"
            )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _plain(leaf: Any) -> Any:
    """What a value adds to the shape of a batch."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return leaf if isinstance(leaf, _PLAIN) else (type(leaf), id(leaf))


def _without_memory(model: nn.Module, policy: Precision) -> nn.Module:
    """A copy of a model on the meta device, in the dtypes in which its code sees it."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = policy.param if policy.mixed and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), False)
    for buffer in model.buffers():
        dtype = policy.buffer if policy.buffer and buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=dtype, device="meta")
    try:
        return deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(
            f"pp copies {type(model).__name__}, without its weights, and that ended in {_told(error)}; "
            f"let it be copied (copy.deepcopy), or use pp=1"
        ) from error


def _move(model: nn.Module, device: torch.device) -> None:
    """Give a model new tensors like its own; under a mode in which they take no memory."""
    moved: dict[Tensor, Any] = {}
    for module in model.modules():
        for held in (parameters_of(module), module._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if value not in moved:
                    new = torch.empty(value.shape, dtype=value.dtype, device=device)
                    moved[value] = nn.Parameter(new, False) if isinstance(value, nn.Parameter) else new
                held[name] = moved[value]
