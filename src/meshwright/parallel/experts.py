"""Expert parallel: data-parallel ranks deal out the experts of every mixture among them, and send each other tokens.

Rank r of an `ep` group holds the r-th part of the stacked experts. In a forward pass every rank has chosen experts for
its own tokens and sorted them; then

    counts      each tells each how many rows it sends to which of its experts
    dispatch    an all-to-all brings every row to the rank of its expert
    experts     each rank applies its own, to rows of all
    combine     the reverse all-to-all brings results back to whom the token belongs

and the backward pass takes the same way. Every rank takes part in every exchange, with nothing to send if need be.
The gradient of an expert is the sum over the tokens of all ranks of its group when it is computed: only ranks that hold
the same expert, the `copies`, still have to add theirs up (`data.py`).

Experts that take their tokens with the numbers of the chosen ones (`expert_plan.py`), as those of transformers do, are
called with one choice for each row, of weight one; weights and sums stay with whom the token belongs.

With tensor parallel the inner width of each expert is split as well, and every tensor-parallel rank exchanges its
part of the results within a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from meshwright.cuts import part
from meshwright.models.expert_plan import count_of, experts_of
from meshwright.models.mixture import how_often
from meshwright.models.reads import Forward, around_forward, local_part, read_through
from meshwright.models.rows import put_rows, take_rows
from meshwright.parallel.data import Reduction
from meshwright.parallel.mesh import ExpertMesh
from meshwright.torch_private import all_to_all, parameters_of

Experts = Callable[[Tensor, Tensor], Tensor]


def apply(model: nn.Module, mesh: ExpertMesh, reduction: Reduction) -> None:
    """Split the experts of a model in place, after tensor parallel has cut each of them; on the meta device too."""
    for _, module, call in experts_of(model):
        count, ranks = count_of(module), mesh["ep"].size()
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor):
                read_through(module, name, local_part)
            if reduction == "mean":
                # The average over copies is one of sums over `ep` ranks.
                read_through(module, name, partial(_divide_gradient, ranks))
            parameters_of(module)[name] = _split(parameter, mesh)
        exchange = _exchange_rows if call == "rows" else partial(_exchange_choices, count)
        # Inside of what tensor parallel does: its ranks' parts of a sum are added up when they are back.
        around_forward(module, partial(exchange, mesh["ep"].get_group()), innermost=True)
        if getattr(module, "num_experts", None) == count:
            module.num_experts = count // ranks  # type: ignore[assignment]


def _split(parameter: nn.Parameter, mesh: ExpertMesh) -> nn.Parameter:
    """This rank's experts of a parameter, of which tensor parallel may have left a part."""
    held, over = parameter.detach(), mesh["ep"]
    placements: list[Placement] = [Shard(0)]
    shape, stride = held.shape, held.stride()
    if isinstance(held, DTensor):
        over, placements = mesh["ep", "tp"], [Shard(0), *held.placements]
        held = held.to_local()
    own = held[part(shape[0], over.size(0), over.get_local_rank(0))].clone()
    split = DTensor.from_local(own, over, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def _exchange_rows(group: dist.ProcessGroup, experts: Experts, x_RC: Tensor, counts_E: Tensor) -> Tensor:
    """Apply experts of all ranks of a group to this rank's rows, grouped by expert, counts[e] of them each."""
    ranks = group.size()
    sent = counts_E.view(ranks, -1)
    received = all_to_all(sent, [1] * ranks, [1] * ranks, group)
    # Both at once: here the host waits for the device.
    to_each, from_each = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
    rows = _Exchange.apply(x_RC, to_each, from_each, group)
    # They come by sender and then by expert; experts want them by expert.
    expert = _numbers(received.shape[1], x_RC).repeat(ranks)
    order = expert.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
    results = _apply_experts(experts, take_rows(rows, order), received.sum(dim=0))
    return _Exchange.apply(put_rows(results, order, len(order)), from_each, to_each, group)


def _apply_experts(experts: Experts, x_RC: Tensor, counts_E: Tensor) -> Tensor:
    """What this rank's experts give; without a row there are gradients too, which are zero."""
    if len(x_RC):
        return experts(x_RC, counts_E)
    one = torch.zeros_like(counts_E)
    one[0] = 1
    return experts(torch.cat((x_RC, x_RC.new_zeros(1, *x_RC.shape[1:]))), one)[:0]


def _exchange_choices(
    count: int, group: dist.ProcessGroup, experts: Forward, x_NC: Tensor, index_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    """The same for tokens that come with their chosen experts: the weighted sum of what these give.

    A number beyond the last expert stands for none.
    """
    if x_NC.ndim != 2 or index_NK.ndim != 2 or index_NK.shape != weights_NK.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x_NC, index_NK, weights_NK))
        raise ValueError(f"ep wants experts to be called with (N, C), (N, K) and (N, K), not {shapes}")
    counts_E = how_often(index_NK.clamp(max=count), count)
    order = index_NK.flatten().argsort(stable=True)[: int(counts_E.sum())]
    rows = take_rows(x_NC, order, index_NK.shape[1])
    results = _exchange_rows(group, partial(_by_choice, experts), rows, counts_E)
    y_NKC = put_rows(results, order, index_NK.numel()).unflatten(0, index_NK.shape)
    return (y_NKC * weights_NK[..., None]).sum(dim=1).to(x_NC.dtype)


def _by_choice(experts: Forward, x_RC: Tensor, counts_E: Tensor) -> Tensor:
    """Each row's own expert, as experts that take choices apply it."""
    index_R = _numbers(len(counts_E), x_RC).repeat_interleave(counts_E, output_size=len(x_RC))
    return experts(x_RC, index_R[:, None], x_RC.new_ones(len(x_RC), 1))


def _numbers(count: int, like: Tensor) -> Tensor:
    """0, 1, ... where another tensor is."""
    return torch.arange(count, device=like.device)


class _Exchange(torch.autograd.Function):
    """Rows to every rank and from every rank; their gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = to_each, from_each, group
        return all_to_all(rows, from_each, to_each, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        to_each, from_each, group = ctx.way
        return all_to_all(gradients[0], to_each, from_each, group), None, None, None


class _DivideGradient(torch.autograd.Function):
    """Hands its input through; its gradient is divided."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, by: int) -> Tensor:
        ctx.by = by
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.by, None


def _divide_gradient(by: int, parameter: Tensor) -> Tensor:
    return _DivideGradient.apply(parameter, by)
