"""AdamW with decay groups, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.config import TrainSection


def make_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.AdamW:
    """AdamW in its fused form; matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    # CPU and CUDA, the devices that run, both have the fused kernel.
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr, betas=betas, eps=train.eps, fused=True)


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """The global norm of the gradients; they are scaled down to `largest` where it is set and exceeded."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None], foreach=True)
    if largest:
        torch.nn.utils.clip_grads_with_norm_(held, largest, norm, foreach=True)
    return norm
