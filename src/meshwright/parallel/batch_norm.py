"""BatchNorm whose statistics are those of the samples of all data ranks, as one device has them.

Every rank gives the mean, the squares around it and the count of its own values; what comes out is the statistics of
all of them together, whatever the shares. Running statistics are the same on all ranks and move once for each
micro-step, also where a forward pass is computed again for the backward one. torch's SyncBatchNorm does the sums on
GPUs only, and does not know samples that do not count. In bf16 and fp16 statistics are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from meshwright.errors import ConfigError
from meshwright.models.reads import around_forward, seen
from meshwright.parallel.torch_releases import all_gather_into


@dataclass
class Counting:
    """Whether the samples in hand count: those of a pass that a rank only takes part in do not."""

    counts: bool = True


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The modules of a model that look at all samples of a micro-batch, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def has_synchronised(model: nn.Module) -> bool:
    """Whether torch's own way to statistics of all ranks is in a model: ours takes its place."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check(model: nn.Module, tp: int, data_ranks: int) -> None:
    """Raise a ConfigError for a norm that cannot be what it is on one device."""
    for name, one in model.named_modules():
        if isinstance(one, _InstanceNorm) and one.track_running_stats and data_ranks > 1:
            raise ConfigError(
                f"{name} is an {type(one).__name__} with running statistics, which would be those of each rank's own "
                "samples; set track_running_stats=False"
            )
    for name, module in batch_norms(model):
        kind = type(module).__name__
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
            raise ConfigError(f"{name} is a {kind} that has no shape yet; call the model once before parallelize")
        if tp > 1:
            raise ConfigError(
                f"tp={tp} does not know {name}, a {kind}: its statistics are those of whole channels and all tokens; "
                "use tp=1 with zero=3, or another norm"
            )


def apply(model: nn.Module, group: dist.ProcessGroup | None, counting: Counting) -> None:
    """Let the BatchNorms of a model take statistics over the ranks of a group."""
    for _, module in batch_norms(model):
        if isinstance(module, nn.SyncBatchNorm):
            # DDP looks for the class, and refuses it on CPUs.
            module.__class__ = _AnyBatchNorm  # type: ignore[assignment]
        module.__dict__["repeating"] = False
        around_forward(module, torch.compiler.disable(partial(_forward, module, group, counting)))


class _AnyBatchNorm(_BatchNorm):
    """In the place of torch's SyncBatchNorm."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {x.ndim}D input)")


def _forward(
    module: _BatchNorm,
    group: dist.ProcessGroup | None,
    counting: Counting,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    if not module.training:
        return forward(x) if module.running_var is None else _normalised(module, module.running_var.dtype, x)
    module._check_input_dim(x)
    weight, bias = seen(module, "weight"), seen(module, "bias")
    y, mean, square, count = _Normalise.apply(x, weight, bias, module.eps, group, counting.counts)
    if not module.__dict__["repeating"]:
        _track(module, mean, square, count)
    return y


def _normalised(module: _BatchNorm, wide: torch.dtype, x: Tensor) -> Tensor:
    """By the running statistics, which are wider than what a model may compute in."""
    weight, bias = (None if one is None else one.to(wide) for one in (seen(module, "weight"), seen(module, "bias")))
    y = F.batch_norm(x.to(wide), module.running_mean, module.running_var, weight, bias, eps=module.eps)
    return y.to(x.dtype)


@torch.no_grad()
def _track(module: _BatchNorm, mean: Tensor, square: Tensor, count: Tensor) -> None:
    """Move the running statistics, whose variance is the unbiased one."""
    if module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share: Tensor | float
    share = 1.0 / module.num_batches_tracked.double() if module.momentum is None else module.momentum
    for held, new in ((module.running_mean, mean), (module.running_var, square / (count - 1))):
        held.mul_(1 - share).add_(new.to(held.dtype) * share)


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias; with it the mean, the sum of squares around it and the count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, square, count = _statistics(x.to(wide), group, counts)
        inverse = (square / count + eps).rsqrt()
        y = (x.to(wide) - _along(mean, x)) * _along(inverse, x)
        if weight is not None:
            y = y * _along(weight, x)
        if bias is not None:
            y = y + _along(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group, ctx.counts, ctx.has_bias = group, counts, bias is not None
        ctx.mark_non_differentiable(mean, square, count)
        return y.to(x.dtype), mean, square, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = mean.dtype
        over = [dim for dim in range(x.ndim) if dim != 1]
        normal = (x.to(wide) - _along(mean, x)) * _along(inverse, x)
        gradient = gradients[0].to(wide)
        sums = torch.stack((gradient.sum(over), (gradient * normal).sum(over)))
        of_bias, of_weight = sums.clone()
        if ctx.group is not None:
            dist.all_reduce(sums, group=ctx.group)
        # Through the statistics: a sample that does not count has no part in them.
        through = (_along(sums[0], x) + normal * _along(sums[1], x)) / count if ctx.counts else 0.0
        of_x = (gradient - through) * _along(inverse if weight is None else inverse * weight, x)
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _along(value: Tensor, x: Tensor) -> Tensor:
    """One value a channel, against what has channels as its second dimension."""
    return value.view(1, -1, *(1 for _ in range(x.ndim - 2)))


def _statistics(x: Tensor, group: dist.ProcessGroup | None, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the sum of squares around it and the count of each channel's values on all ranks."""
    over = [dim for dim in range(x.ndim) if dim != 1]
    channels = x.shape[1]
    own_count = x.numel() // channels if counts else 0
    mean = x.mean(over)
    square = (x - _along(mean, x)).square().sum(over) * counts
    count = x.new_full((), float(own_count))
    if group is not None:
        own = torch.cat((mean, square, count[None]))
        everyone = own.new_empty(dist.get_world_size(group), len(own))
        all_gather_into(everyone.view(-1), own, group=group)
        means, squares, counted = everyone.split((channels, channels, 1), dim=1)
        count = counted.sum()
        mean = (means * counted).sum(0) / count
        square = (squares + (means - mean).square() * counted).sum(0)
    if not x.is_cuda and float(count) <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    return mean, square, count
