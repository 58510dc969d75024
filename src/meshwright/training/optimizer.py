"""The optimizer of a run: AdamW or another, with decay groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwright.config import TrainSection
from meshwright.parallel.model import Parallel


def make_optimizer(model: Parallel, train: TrainSection) -> torch.optim.Optimizer:
    """The optimizer that train.optimizer names; matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model.optimizer(_maker(train), [group for group in groups if group["params"]])


def kept_state(train: TrainSection) -> tuple[frozenset[str], frozenset[str]]:
    """What the optimizer keeps of every matrix and of every vector once it has updated them."""
    match train.optimizer:
        case "sgd":
            found = frozenset({"momentum_buffer"} if train.beta1 else ())
            return found, found
        case "adafactor":
            return frozenset({"step", "row_var", "col_var"}), frozenset({"step", "variance"})
        case _:
            found = frozenset({"step", "exp_avg", "exp_avg_sq"})
            return found, found


def _maker(train: TrainSection) -> Callable[..., torch.optim.Optimizer]:
    # CPU and CUDA, the devices that run, both have the fused kernels.
    match train.optimizer:
        case "sgd":
            return partial(torch.optim.SGD, lr=train.lr, momentum=train.beta1, fused=True)
        case "adafactor":
            return partial(torch.optim.Adafactor, lr=train.lr)
        case _:
            betas = (train.beta1, train.beta2)
            return partial(torch.optim.AdamW, lr=train.lr, betas=betas, eps=train.eps, fused=True)
