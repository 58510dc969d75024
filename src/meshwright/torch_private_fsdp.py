"""Private names of PyTorch's FSDP that are used here: its groups of parameters, and what it does around passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule

__all__ = ["FsdpParameter", "around_backward", "fold_gradients", "pass_through", "reduce_gradients", "replicate"]


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what backward passes have gathered in the gradients of whole parameters since the last time."""
    fold_gradients(root)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    for group in _parameter_groups(root):
        group.post_backward()
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


class FsdpParameter:
    """A parameter that FSDP gathers, between a backward pass and the reduction of its gradient."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def stored(self) -> nn.Parameter:
        """As optimizers know it."""
        parameter: nn.Parameter = self._held.sharded_param
        return parameter

    @property
    def has_gradient(self) -> bool:
        """Whether backward passes have given it one that is not reduced yet."""
        held = self._held
        return held.unsharded_accumulated_grad is not None or held._unsharded_param.grad is not None

    def fill_with_zeros(self) -> None:
        """Give it a gradient of zeros."""
        whole = self._held._unsharded_param
        whole.grad = torch.zeros_like(whole)


def around_backward(
    root: FSDPModule, before: Callable[[FsdpParameter, bool], None], after_last: Callable[[], None]
) -> None:
    """Call `before(parameter, reduces)` for every parameter of a group whose backward pass is done, and `after_last`
    when the last backward pass of a step has reduced them."""

    def post_backward(group: Any, reduce: Callable[..., Any], *unused: Any) -> Any:
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param") and held.sharded_param.requires_grad:
                before(FsdpParameter(held), group.reduce_grads)
        return reduce(*unused)

    def final_callback(state: Any, finish: Callable[[], None]) -> None:
        last = state._state_ctx.is_last_backward
        finish()
        if last:
            after_last()

    # Modules that are gathered together share a state; which state's callback ends a backward pass is not said.
    for state in {id(one): one for one in map(_state, root.modules()) if one is not None}.values():  # type: ignore[attr-defined]
        for group in _groups_of(state):
            group.post_backward = partial(post_backward, group, group.post_backward)
        state._root_post_backward_final_callback = partial(
            final_callback, state, state._root_post_backward_final_callback
        )


def pass_through(module: Any, inputs: Any, gathers: bool) -> Any:
    """Take a module's part in FSDP's collectives without calling it, or (unless it `gathers`) end a call of which only
    some modules were called that are gathered together. `inputs` come out as the module's outputs would, so that the
    backward pass comes by here, too."""
    state = module._get_fsdp_state()
    if gathers:
        args, kwargs = state._pre_forward(module, *inputs)
        inputs = (args, kwargs)
    inputs = state._post_forward(module, None, inputs)
    getattr(state, "_modules_to_run_forward", set()).clear()
    return inputs


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def fold_gradients(root: FSDPModule) -> None:
    """Add what a backward pass has left in the dtype of computing to what is kept in that of sums, where they differ.

    FSDP does so after backward passes; those to weights alone it does not see.
    """
    for group in _parameter_groups(root):
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param"):
                held.accumulate_unsharded_grad_if_needed()
                held.to_accumulated_grad_if_needed()


def _parameter_groups(root: FSDPModule) -> list[Any]:
    state: Any = root._get_fsdp_state()
    found: list[Any] = []
    for one in state._state_ctx.all_states:
        found += _groups_of(one)
    return found


def _groups_of(state: Any) -> list[Any]:
    # 2.13 allows several groups of parameters a module.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
