"""AdamW with decay groups, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.config import TrainSection
from meshwright.parallel.zero1 import ShardedOptimizer


def make_optimizer(
    model: nn.Module, train: TrainSection, shard_state_over: DeviceMesh | None = None
) -> torch.optim.Optimizer | ShardedOptimizer:
    """AdamW in its fused form; matrices decay, norms and biases do not. Its state may be sharded over a mesh."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    # CPU and CUDA, the devices that run, both have the fused kernel.
    make = partial(torch.optim.AdamW, lr=train.lr, betas=betas, eps=train.eps, fused=True)
    held = [group for group in groups if group["params"]]
    return make(held) if shard_state_over is None else ShardedOptimizer(held, make, shard_state_over)


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """The global norm of the gradients; they are scaled down to `largest` where it is set and exceeded."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None], foreach=True)
    if largest:
        torch.nn.utils.clip_grads_with_norm_(held, largest, norm, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
