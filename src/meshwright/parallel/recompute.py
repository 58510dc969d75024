"""Recompute: activations that the backward pass computes again instead of keeping them.

    full        every layer keeps its input only
    first:N     so do the first N layers; the others keep everything
    selective   every layer keeps what is dear to compute (matrix products, attention, sums over ranks) and computes
                the rest again (norms, activations, rotations, gathered tokens)

Results are the same to the last bit: masks of dropout are a function of the sample, and no state moves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.models.mixture import Mixture, mixtures
from meshwright.parallel.reads import around_forward
from meshwright.parallel.ring_attention import RING_ATTENTION

Context = AbstractContextManager[None]

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    RING_ATTENTION,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def apply(blocks: Sequence[nn.Module], recompute: str, draws: bool = True) -> None:
    """Arrange it for the layers of a model; `draws` says whether they draw random numbers, to be drawn again alike."""
    kind, _, count = recompute.partition(":")
    if kind == "none":
        return
    for block in blocks[: int(count)] if kind == "first" else blocks:
        around_forward(block, partial(_again, list(mixtures(block)), kind == "selective", draws))


def _again(
    held: list[Mixture], selective: bool, draws: bool, forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    contexts = partial(_contexts, held, selective)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts, **options)


def _contexts(held: list[Mixture], selective: bool) -> tuple[Context, Context]:
    """The contexts of the first and of the repeated forward pass."""
    first, again = create_selective_checkpoint_contexts(_policy) if selective else (nullcontext(), nullcontext())
    return first, _repeating(held, again)


def _policy(_: object, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _repeating(held: list[Mixture], inner: Context) -> Iterator[None]:
    """Tokens were counted in the first pass."""
    for mixture in held:
        mixture.repeating = True
    try:
        with inner:
            yield
    finally:
        for mixture in held:
            mixture.repeating = False
