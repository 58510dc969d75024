"""From gradients to new weights, once all ranks know whether a step is fit to learn from.

On a GPU nobody waits for the answer: the optimizer's kernels are launched with it as an argument, and change nothing
where it is no. The numbers of the step travel to the host meanwhile, and what the host does with them (records, the
next batch, the first kernels of the next pass) hides behind the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.local_optimizer import LocalOptimizer, inner_of
from meshwright.parallel.norm import clip_factor, multiply_gradients_


class OnItsWay:
    """Numbers of a device that the host will read."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers; waits for them, not for what was launched after them."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(number) for number in self._numbers.tolist()]


def unfit(loss: Tensor, norm: Tensor, limits: tuple[float, float]) -> Tensor:
    """One where a step of this loss and norm is not to be learned from, else zero, on the device."""
    highest_loss, highest_norm = limits
    fit = loss.isfinite() & norm.isfinite() & (loss <= highest_loss) & (norm <= highest_norm)
    return (~fit).to(torch.float32)


def updates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernels scale gradients and leave out steps by themselves."""
    on_host = isinstance(optimizer, LocalOptimizer) and optimizer.on_host
    return device.type == "cuda" and not on_host and getattr(inner_of(optimizer), "_step_supports_amp_scaling", False)


def update_if_fit(optimizer: torch.optim.Optimizer, skip: Tensor, norm: Tensor, max_norm: float, scale: float) -> None:
    """Launch an update with clipped gradients that leaves everything as it is where `skip` is one."""
    _begin_momentum(optimizer)
    told: Any = optimizer
    told.grad_scale = (scale / clip_factor(norm, max_norm)).float() if max_norm or scale != 1.0 else None
    told.found_inf = skip
    optimizer.step()
    told.grad_scale = told.found_inf = None


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start momentum at zero: torch's SGD makes it of fresh memory, which a first step that is left out never fills."""
    inner = inner_of(optimizer)
    if not isinstance(inner, torch.optim.SGD):
        return
    for group in inner.param_groups:
        for part in group["params"] if group["momentum"] else ():
            if inner.state[part].get("momentum_buffer") is None:
                inner.state[part]["momentum_buffer"] = torch.zeros_like(part)


def update(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Iterable[Tensor],
    norm: Tensor,
    max_norm: float,
    scale: float,
) -> None:
    """Clip the gradients and update."""
    if max_norm or scale != 1.0:
        multiply_gradients_(parameters, clip_factor(norm, max_norm) / scale)
    for optimizer in optimizers:
        optimizer.step()
