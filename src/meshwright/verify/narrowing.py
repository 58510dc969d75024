"""Where a model in float64 rounds to fewer digits by itself, as norms that compute in float32 do.

Sums of such numbers in another order differ by float32's rounding, on one device as well: a proof in float64 has to
know, or it would take that for a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Narrowing(TorchDispatchMode):
    """A context of passes; `found` then names the first module that rounds, with its kind and the dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = ""
        self._inside: list[str] = []
        self._hooks = [
            hook
            for name, module in model.named_modules()
            for hook in (
                module.register_forward_pre_hook(self._entering(name, module)),
                module.register_forward_hook(self._leaving, always_call=True),
            )
        ]

    def _entering(self, name: str, module: nn.Module) -> Any:
        return lambda *_: self._inside.append(f"{name or 'the model'} ({type(module).__name__})")

    def _leaving(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found and self._inside and func is torch.ops.aten._to_copy.default:
            given, made = args[0], result.dtype
            # Constants, such as angles, are the same however a model is split.
            learned = isinstance(given, Tensor) and given.requires_grad and given.dtype == torch.float64
            if learned and made.is_floating_point and made != torch.float64:
                self.found = f"{self._inside[-1]} rounds to {str(made).removeprefix('torch.')}"
        return result

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)
