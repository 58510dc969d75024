"""Operations that keep for their backward pass what a GPU's kernels keep, for tensors without memory.

On cores some of them are made of several operations that keep more; a rehearsal is of a GPU's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.models import cross_entropy, float8, head, mixture
from meshwright.torch_private import without_modes


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel: it keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:rows], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    found: Tensor = _FusedNorm.apply(input, weight, input.dim() - len(normalized_shape))
    return found


def _losses_and_gradient_(
    logits_NV: Tensor,
    targets_N: Tensor,
    factor: Tensor,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
    learns: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropies as one kernel: the gradient is where the logits were."""
    if group is None and logits_NV.dtype in (torch.bfloat16, torch.float16):
        return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32), logits_NV if learns else None
    return cross_entropy.losses_and_gradient_(logits_NV, targets_N, factor, first, group, learns)


def _transposed(values: Tensor, factors: Tensor | None) -> Tensor:
    """A matrix in 8 bits turned around by one kernel."""
    return values.new_empty(values.shape[1], values.shape[0])


def _equal_shares(numbers: Tensor, count: int) -> Tensor:
    """How often each number comes, if all come alike: real, so that it can be read."""
    with without_modes():
        each, more = divmod(numbers.numel(), count)
        return each + (torch.arange(count) < more).long()


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Use them in place of PyTorch's own, and let routers send every expert the same number of rows."""
    places = (
        (functional, "rms_norm", _rms_norm),
        (float8, "multiply_on", lambda device: float8.by_kernel),
        (float8, "transposed", _transposed),
        (head, "losses_and_gradient_", _losses_and_gradient_),
        (mixture, "how_often", _equal_shares),
    )
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, function in places:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)
