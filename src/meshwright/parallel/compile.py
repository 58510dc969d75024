"""Compiled layers: torch.compile of one layer's forward pass, which all layers of its kind share.

A layer is what repeats, so it is compiled once, however many there are; embeddings, head and loss stay as they are.
What the compiler cannot take in one piece is named (`breaks`), and runs as it did.

The compiler decides what a layer keeps for its backward pass: what takes longer to compute again than to keep; with
recompute=selective no more than products and attention; with recompute=budget:F the share F, what is dearest for its
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.reads import around_forward, forward_so_far
from meshwright.parallel.context import Context
from meshwright.strategy import Strategy
from meshwright.torch_private import graph_breaks, prepare_compiler


def refusal(strategy: Strategy) -> str | None:
    """Why layers cannot be compiled under a strategy, in words."""
    if strategy.schedule.startswith(("zero-bubble", "zbv")):
        return f"schedule={strategy.schedule} takes backward passes apart, which compiled ones cannot be"
    return None


def compiles(setting: str, strategy: Strategy, device: torch.device) -> bool:
    """Whether layers are compiled: on, off, or auto, on a GPU where the strategy allows it."""
    if setting == "auto":
        return device.type == "cuda" and refusal(strategy) is None
    if setting == "on" and (reason := refusal(strategy)) is not None:
        raise ConfigError(f"train.compile=on: {reason}; use train.compile=auto")
    return setting == "on"


def decides(recompute: str) -> bool:
    """Whether such recompute is the compiler's business."""
    return recompute == "selective" or recompute.startswith("budget:")


def apply(blocks: Sequence[nn.Module], recompute: str = "none", backend: str = "inductor") -> None:
    """Arrange it for the layers of a model."""
    budget = float(recompute.removeprefix("budget:")) if recompute.startswith("budget:") else 1.0
    prepare_compiler(budget, lean=decides(recompute))
    for block in blocks:
        for module in block.modules():
            if isinstance(getattr(vars(module).get("attend"), "__self__", None), Context):
                # Attention over ranks sends messages on its way, which no compiler follows.
                module.attend = torch.compiler.disable(module.attend)
        around_forward(block, partial(_run, _compiled(forward_so_far(block), backend), block))


@cache
def _compiled(forward: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(forward, backend=backend)


def _run(
    compiled: Callable[..., Tensor], block: nn.Module, forward: Callable[..., Tensor], *inputs: Any, **options: Any
) -> Tensor:
    # Evaluation is rare and comes in many lengths: it is not worth a compilation.
    return compiled(block, *inputs, **options) if torch.is_grad_enabled() else forward(*inputs, **options)


def breaks() -> dict[str, int]:
    """Why compiled layers fell apart into pieces, and how often."""
    return graph_breaks()
