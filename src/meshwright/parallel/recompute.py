"""Recompute: activations that the backward pass computes again instead of keeping them.

    full        every layer keeps its input only
    first:N     so do the first N layers; the others keep everything
    selective   every layer keeps what is dear to compute (matrix products, attention, sums over ranks, rows from other
                ranks) and computes the rest again (norms, activations, rotations, gathered tokens)
    budget:F    compiled layers only, see `compile.py`, which does selective for them too

Results are the same to the last bit: masks of dropout are a function of the sample, and no state moves twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from meshwright.errors import ConfigError
from meshwright.models.grouped_product import grouped_product  # noqa: F401
from meshwright.models.mixture import mixtures
from meshwright.models.reads import around_forward
from meshwright.parallel.batch_norm import batch_norms
from meshwright.parallel.host_activations import HostActivations, View, unpack
from meshwright.parallel.ring_attention import RING_ATTENTION

Context = AbstractContextManager[None]

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.meshwright.grouped_product.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    RING_ATTENTION,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def apply(blocks: Sequence[nn.Module], recompute: str, draws: bool = True, host: HostActivations | None = None) -> None:
    """Arrange it for the layers of a model; `draws` says whether they draw random numbers, to be drawn again alike.

    With `host`, what selective keeps goes there.
    """
    kind, _, count = recompute.partition(":")
    if kind == "none":
        return
    if kind == "budget":
        raise ConfigError(f"recompute={recompute} is for compiled layers: set train.compile=on, or use selective")
    for block in blocks[: int(count)] if kind == "first" else blocks:
        held = [*mixtures(block), *(norm for _, norm in batch_norms(block))]
        around_forward(block, partial(_again, held, kind == "selective", draws, host))


def _again(
    held: list[nn.Module],
    selective: bool,
    draws: bool,
    host: HostActivations | None,
    forward: Callable[..., Any],
    *inputs: Any,
    **options: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    contexts = partial(_contexts, held, selective, host)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts, **options)


def _contexts(
    held: list[nn.Module], selective: bool, host: HostActivations | None
) -> tuple[AbstractContextManager[Any], Context]:
    """The contexts of the first and of the repeated forward pass."""
    if not selective:
        return nullcontext(), _Repeating(held, nullcontext())
    results = _Results(host)
    return _Keep(results), _Repeating(held, _Take(results))


class _Results:
    """What operations gave in the first pass, in their order."""

    def __init__(self, host: HostActivations | None) -> None:
        self._host = host
        self.of: dict[Any, deque[Any]] = {operation: deque() for operation in _KEPT}

    def kept(self, tensor: Tensor) -> Tensor | View:
        """What is kept of a result: detached, or it would hold the graph that will hold it."""
        return tensor.detach() if self._host is None else self._host.pack(tensor.detach())


# Torch's own contexts for this demand that both passes do all the same operations. They do not where weights are
# gathered inside of a layer, and are there already in one of the passes.


class _Mode(TorchDispatchMode):
    """Follows operations, and lets a compiler make kernels meanwhile: what these are made of is not seen."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    """Keeps the results of dear operations."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = operation(*inputs, **(options or {}))
        if operation in _KEPT:
            self.results.of[operation].append(tree_map_only(Tensor, self.results.kept, result))
        return result


class _Take(_Mode):
    """Gives the results that were kept, in order, instead of computing them; from the first one each time."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self.results = results
        self.left: dict[Any, deque[Any]] = {}

    def __enter__(self) -> Self:
        self.left = {operation: kept.copy() for operation, kept in self.results.of.items()}
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        if operation in _KEPT:
            return tree_map_only(View, unpack, self.left[operation].popleft())
        return operation(*inputs, **(options or {}))


class _Repeating(AbstractContextManager[None]):
    """Tokens were counted in the first pass, running statistics moved. May be entered again: split backward passes
    compute twice."""

    def __init__(self, held: list[nn.Module], inner: AbstractContextManager[Any]) -> None:
        self._held = held
        self._inner = inner

    def __enter__(self) -> None:
        for module in self._held:
            module.__dict__["repeating"] = True
        self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)
        for module in self._held:
            module.__dict__["repeating"] = False
