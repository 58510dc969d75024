"""The optimizer of a run: AdamW or another, with decay groups."""

from __future__ import annotations

from functools import partial

import torch

from meshwright.config import TrainSection
from meshwright.parallel.parallelize import AnyOptimizer, Parallel


def make_optimizer(model: Parallel, train: TrainSection) -> AnyOptimizer:
    """The optimizer in its fused form; matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    # CPU and CUDA, the devices that run, both have the fused kernel.
    make = partial(torch.optim.AdamW, lr=train.lr, betas=betas, eps=train.eps, fused=True)
    return model.optimizer(make, [group for group in groups if group["params"]])
