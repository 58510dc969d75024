"""Bytes of tensors that are alive, operation by operation: the peak of a piece of work, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is on, counts the storages that operations make, until they are gone; what was there before is not.

    `inside` says with which function to follow an operation that is made of others.
    """

    def __init__(self, inside: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.inside = dict(inside or {})
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation in self.inside:
            with self:
                return self.inside[operation](*inputs, **options)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((inputs, options))}
        result = operation(*inputs, **options)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _forget(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


def _tensors(tree: Any) -> list[Tensor]:
    """The plain tensors: wrappers of others, such as results that are waited for, have no memory of their own."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, nn.Parameter)]
