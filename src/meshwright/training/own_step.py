"""A step of a loop of one's own: from a rank's samples to gradients, from gradients to new weights.

Samples weigh alike, on whatever rank and in whatever micro-step they are: a mean over a micro-batch is weighed by the
number of its samples, of all that the step has on all data ranks. So a last batch that does not go round evenly gives
the gradient that one device has of it. Ranks take part in as many passes as the others; one that has no sample left
for a pass takes its first one again, with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import UserError
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import mixtures, step_load
from meshwright.parallel.batch_norm import batch_norms
from meshwright.parallel.batch_sampler import BatchSampler
from meshwright.parallel.norm import check_clip
from meshwright.parallel.own_loop import Parallel
from meshwright.training.step import TrainingError
from meshwright.training.update import unfit, update, update_if_fit, updates_on_device

LossOf = Callable[..., Tensor]


def backward(
    parallel: Parallel, loss_of: LossOf, batch: tuple[Any, ...], micro_steps: int, whose: BatchSampler | None
) -> Tensor:
    """The passes of a step over this rank's samples, a batch of a sampler's or of none; gives the mean loss of those of
    all data ranks."""
    batch = tuple(_plain(one) for one in batch)
    samples = samples_of(batch)
    if not samples:
        raise UserError(
            "backward got no sample on this rank; give each data rank at least one (parallel.batch_sampler)"
        )
    if micro_steps < 1:
        raise UserError(f"micro_steps={micro_steps}: use a whole number from 1")
    device = _device(parallel)
    everyone = _over_data(parallel, torch.full((), float(samples), dtype=torch.float64, device=device))
    for mixture in mixtures(parallel.module):
        mixture.auxiliary_scale = parallel.loss_scale.value / micro_steps
    total = torch.zeros((), dtype=torch.float64, device=device)

    def weighed(model: Parallel, micro: tuple[int, Any]) -> Tensor:
        count, own = micro
        parallel.counting.counts = count > 0
        loss = loss_of(model, *own)
        check_loss(loss)
        share = count / everyone
        total.add_(loss.detach().to(device, torch.float64) * share)
        return _scaled(parallel, loss, share)

    micro_batches = list(_micro_batches(batch, parallel.loop.cuts(whose, samples, micro_steps)))
    if parallel.pipeline is not None and not all(count for count, _ in micro_batches) and batch_norms(parallel.module):
        # The passes of a pipeline's micro-batches are in one another's way: which one a BatchNorm sees is not known.
        raise UserError(
            f"micro_steps={micro_steps} and {samples} samples on this rank leave a pass without one, which BatchNorm "
            "in a pipeline cannot tell; use fewer micro_steps, or batches that go round"
        )
    try:
        parallel.passes(weighed, micro_batches)
    finally:
        parallel.counting.counts = True
    return _mean_loss(parallel, total)


def backward_of(parallel: Parallel, loss: Tensor, samples: int) -> Tensor:
    """The backward pass of a mean over that many samples of this rank; gives the mean loss of all data ranks."""
    check_loss(loss)
    device = _device(parallel)
    counted = torch.full((), float(samples), dtype=torch.float64, device=device)
    share = counted / _over_data(parallel, counted.clone())
    _scaled(parallel, loss, share).backward()
    return _mean_loss(parallel, loss.detach().to(device, torch.float64) * share)


def step(parallel: Parallel, optimizers: Sequence[torch.optim.Optimizer], clip: float) -> Tensor:
    """Unscale, clip, update and drop the gradients; gives their norm. An overflow of fp16 leaves the weights alone."""
    check_clip(clip)
    scale, device = parallel.loss_scale, _device(parallel)
    factor, exhausted = scale.value, scale.exhausted
    norm = parallel.grad_norm(scale=factor)
    if scale.active and all(updates_on_device(one, device) for one in optimizers):
        # Launched before the host knows whether the step is taken.
        infinite = float("inf")
        skip = unfit(torch.zeros_like(norm), norm, (infinite, infinite))
        for optimizer in optimizers:
            update_if_fit(optimizer, skip, norm, clip, factor)
        taken = scale.accept(norm)
    else:
        taken = scale.accept(norm)
        if taken:
            update(optimizers, parallel.parameters(), norm, clip, factor)
    if not taken and exhausted:
        raise TrainingError(
            f"gradients overflow at a loss scale of {factor:g}, below which it does not go: training has diverged; "
            "lower the learning rate, or use another precision than fp16"
        )
    if _has_experts(parallel):
        load = step_load(parallel.module, parallel.stages)
        if taken:
            load.move_biases()
    if not taken and parallel.compressor is not None:
        parallel.compressor.forget()
    # Dropped, not filled with zeros: what gets no gradient in the next step must have none, or it would still decay.
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm


def check_plain_update(parallel: Parallel) -> None:
    """Raise where an optimizer's own step after `backward` would not do what one device does."""
    if parallel.loss_scale.active:
        raise UserError(
            "with fp16 the gradients of backward are scaled; use parallel.step(optimizer) instead of optimizer.step()"
        )
    if _has_experts(parallel):
        raise UserError("experts are balanced once a step; use parallel.step(optimizer) instead of optimizer.step()")


def samples_of(batch: tuple[Any, ...]) -> int:
    """The samples of a batch: the first dimension of its tensors, the length of its lists of texts; raises where they
    do not agree."""
    columns = [leaf for one in batch for leaf in tree_leaves(one, is_leaf=_is_texts) if _has_rows(leaf)]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        shapes = (str(list(one.shape)) if isinstance(one, Tensor) else f"{len(one)} texts" for one in columns)
        raise UserError(
            f"a batch of {', '.join(shapes) or 'no tensors'}: all of its tensors must have the samples as their first "
            "dimension, and its lists of texts one text for each"
        )
    return lengths.pop()


def _micro_batches(batch: tuple[Any, ...], cuts: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Runs of samples, with how many of them count."""
    for first, end in pairwise(cuts):
        rows = slice(first, end) if end > first else slice(0, 1)
        yield end - first, tuple(tree_map(partial(_rows, rows), one, is_leaf=_is_texts) for one in batch)


def _plain(value: Any) -> Any:
    """Tables of other kinds, such as a tokenizer's, as dictionaries, which are cut."""
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _rows(rows: slice, leaf: Any) -> Any:
    return leaf[rows] if _has_rows(leaf) else leaf


def _has_rows(leaf: Any) -> bool:
    """Whether it has something for each sample."""
    return leaf.ndim > 0 if isinstance(leaf, Tensor) else _is_texts(leaf)


def _is_texts(value: Any) -> bool:
    """A list or tuple of texts, as torch's loaders make of what is no number."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)


def check_loss(loss: Any) -> None:
    """Raise unless a loss is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the loss must be one number, the mean over the samples; got {found}")


def _scaled(parallel: Parallel, loss: Tensor, share: Tensor) -> Tensor:
    """A rank's share of the mean loss, so that the reduction of gradients gives those of the mean; with its scale."""
    strategy = parallel.strategy
    times = strategy.dp if parallel.reduction == "mean" else 1.0 / strategy.cp
    return loss * (share * (parallel.loss_scale.value * times)).to(loss.device)


def _over_data(parallel: Parallel, value: Tensor) -> Tensor:
    """The sum over data ranks, in place."""
    if parallel.mesh is not None and parallel.strategy.dp > 1:
        dist.all_reduce(value, group=parallel.mesh.data.get_group())
    return value


def _mean_loss(parallel: Parallel, total: Tensor) -> Tensor:
    """The sum of the ranks' shares of the mean, once for each token, in the dtype of the weights or wider."""
    if parallel.mesh is not None and parallel.mesh.loss.size() > 1:
        dist.all_reduce(total, group=parallel.mesh.loss.get_group())
        total /= parallel.strategy.cp
    if parallel.stages is not None:
        dist.all_reduce(total, group=parallel.stages)
    return total.to(torch.promote_types(parallel.precision.stored, torch.float32))


def _device(parallel: Parallel) -> torch.device:
    """Where the ranks compute."""
    if parallel.mesh is not None and parallel.mesh.axes.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return next((parameter.device for parameter in parallel.parameters()), torch.device("cpu"))


def _has_experts(parallel: Parallel) -> bool:
    module = parallel.module
    if isinstance(module, Decoder):
        return module.spec.experts is not None
    return any(True for _ in mixtures(module))
