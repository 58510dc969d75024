"""Parameters that a step does not use have no gradient, as on one device, where others use them on other ranks too.

FSDP reduces the gradients that a rank has. Ranks that have other ones, since the samples decide what is used, would
wait for each other: so what a rank lacks counts as zero. After the last backward pass of a step the ranks tell each
other which parameters any of them has used, and the others are left without a gradient: an optimizer must not move
them, and weight decay would. That takes one small sum a step; only ranks that lacked something wait for it. A model
that promises to use all of them (`uses_all_parameters`) saves that sum, and is held to its word.

A layer that is gathered by itself is gathered when it is called. A rank whose samples leave it out takes part all the
same, in the order of the layers: what goes into the next one passes through the empty place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from meshwright.errors import ConfigError, UserError
from meshwright.torch_private_fsdp import FsdpParameter, around_backward, pass_through


class Used:
    """Which parameters have got a gradient since the last reduction, here; and after it, anywhere."""

    def __init__(self, root: FSDPModule, group: dist.ProcessGroup, device: torch.device) -> None:
        self._root, self._group, self._device = root, group, device
        self._here: dict[nn.Parameter, bool] = {}
        self._filled: set[nn.Parameter] = set()
        """Those whose gradient is nothing but zeros, as far as this rank knows."""
        around_backward(root, self._before_reduction, self._after_last)

    def _before_reduction(self, held: FsdpParameter, reduces: bool) -> None:
        parameter = held.stored
        has = held.has_gradient
        self._here[parameter] = self._here.get(parameter, False) or has
        if reduces and not has:
            if parameter.grad is None:
                self._filled.add(parameter)
            held.fill_with_zeros()

    @torch.no_grad()
    def _after_last(self) -> None:
        used = torch.tensor(list(self._here.values()), dtype=torch.uint8).to(self._device, non_blocking=True)
        if len(used):
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        lacking = [not here for here in self._here.values()]
        if any(lacking):
            for parameter, anywhere in zip(self._here, used.tolist(), strict=True):
                if not anywhere and parameter in self._filled:
                    parameter.grad = None
        self._here.clear()
        self._filled.clear()


class AllUsed(Used):
    """The same of a model that promises to use all of them: a step that does not is an error where one is lacking.

    Until that is told it counts as zero here, too: gradients of other parameters must not take its place.
    """

    @torch.no_grad()
    def _after_last(self) -> None:
        here, self._here = self._here, {}
        for name, parameter in self._root.named_parameters():  # type: ignore[attr-defined]
            if parameter.requires_grad and not here.get(parameter, False):
                raise broken_promise(name)


def broken_promise(name: str) -> ConfigError:
    """What is told of a parameter without a gradient where a model promises that there is none."""
    return ConfigError(
        f"{name} got no gradient in this step, and its model promises `uses_all_parameters`; "
        "remove the promise, or the parameter"
    )


class LeftOut:
    """Takes part for the units of a model that a forward pass leaves out; they are called in their order."""

    def __init__(self, model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
        self._units = units
        self._names = {module: name for name, module in model.named_modules()}
        self._at = -1
        """The unit in hand, of which these are still to be called."""
        self._waiting: set[nn.Module] = set()
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for index, unit in enumerate(units):
            for module in unit:
                module.register_forward_pre_hook(partial(self._enter, index), prepend=True, with_kwargs=True)
                module.register_forward_hook(self._leave)

    def _begin(self, *_: Any) -> None:
        self._at, self._waiting = -1, set()

    def _enter(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if index <= self._at:
            return None
        passed = self._up_to(index, (args, kwargs))
        self._at, self._waiting = index, set(self._units[index])
        return passed

    def _leave(self, module: nn.Module, *_: Any) -> None:
        self._waiting.discard(module)

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        ((output,), _) = self._up_to(len(self._units), ((output,), {}))
        return output

    def _up_to(self, index: int, inputs: Any) -> Any:
        """Pass inputs through what lies between the unit in hand and that one."""
        if self._waiting:
            inputs = pass_through(self._units[self._at][0], inputs, gathers=False)
            self._waiting = set()
        for unit in self._units[self._at + 1 : index]:
            tensors = (one for one in tree_leaves(inputs) if isinstance(one, Tensor))
            if torch.is_grad_enabled() and not any(one.requires_grad for one in tensors):
                raise UserError(
                    f"{self._names[unit[0]]} was left out by a pass, and nothing that has a gradient goes into what "
                    "follows: the ranks could not go back together; call it always, or use zero=1"
                )
            inputs = pass_through(unit[0], inputs, gathers=True)
        return inputs
