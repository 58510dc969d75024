"""The optimizer of a run: AdamW or another, with decay groups; our own AdamW where weights or moments are narrow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwright.config import TrainSection
from meshwright.models.parts import box_of
from meshwright.optim.adamw import FusedAdamW
from meshwright.parallel.local_optimizer import LocalOptimizer, inner_of
from meshwright.parallel.model import SplitModel
from meshwright.parallel.precision import Precision


def make_optimizer(model: SplitModel, train: TrainSection) -> torch.optim.Optimizer:
    """The optimizer that train.optimizer names; matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    own = model.precision.narrow or _on_gpu(model)
    optimizer = model.optimizer(_maker(train, model.precision, own), [group for group in groups if group["params"]])
    if isinstance(inner_of(optimizer), FusedAdamW):
        _tell_places(optimizer, model)
    return optimizer


def _on_gpu(model: SplitModel) -> bool:
    """Whether the update happens on a GPU, in float32: where our own kernel moves fewer bytes than torch's."""
    on_host = model.strategy.host_states != "none"
    return not on_host and all(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())


def _tell_places(optimizer: torch.optim.Optimizer, model: SplitModel) -> None:
    """Tell our AdamW which parameters its parts belong to, and where they lie in them."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part, box = parameter, box_of(parameter)
            if isinstance(optimizer, LocalOptimizer):
                part, box = optimizer.part_of(parameter)
            inner_of(optimizer).place(part, name, box)


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


def _maker(train: TrainSection, precision: Precision, own: bool) -> Callable[..., torch.optim.Optimizer]:
    # CPU and CUDA, the devices that run, both have the fused kernels.
    match train.optimizer:
        case "sgd":
            return partial(torch.optim.SGD, lr=train.lr, momentum=train.beta1, fused=True)
        case "adafactor":
            return partial(torch.optim.Adafactor, lr=train.lr)
        case _:
            betas = (train.beta1, train.beta2)
            if own:
                fused = partial(FusedAdamW, moments=precision.moments, seed=precision.seed)
                return partial(fused, lr=train.lr, betas=betas, eps=train.eps)
            return partial(torch.optim.AdamW, lr=train.lr, betas=betas, eps=train.eps, fused=True)
