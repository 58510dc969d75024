"""The balancing loss of a model of transformers, over the tokens of all data ranks as on one device.

Their models compute it, where asked (`output_router_logits`), from the router's logits that come with the output of the
model below the head. It is not a sum over tokens: an average of what ranks compute of their own would be another loss.
Here those logits are gathered, every rank computes the loss of all tokens, and its gradient goes to the rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.reads import Forward, around_forward
from meshwright.parallel.data import Reduction
from meshwright.parallel.mesh import Mesh
from meshwright.strategy import Strategy
from meshwright.torch_private import all_gather, all_to_all


def apply(model: nn.Module, strategy: Strategy, mesh: Mesh, reduction: Reduction) -> None:
    """Gather what routers say of a model of transformers, where it has any."""
    below = getattr(model, getattr(model, "base_model_prefix", ""), None)
    coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", None)
    if below is None or below is model or coefficient is None or mesh.loss.size() == 1:
        return
    times = 1.0
    if reduction == "mean":
        # An average over ranks divides the gradient of each one's tokens, and a loop multiplies by the rank's share.
        times = mesh.loss.size() * strategy.all_shares / strategy.dp
        times /= strategy.data_shares[mesh.data.get_local_rank()]
    around_forward(below, partial(_gather, mesh.loss.get_group(), times))


def check_stages(kind: str, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a call that asks for it where each rank has the routers of some layers alone."""
    configured = getattr(getattr(model, "config", None), "output_router_logits", False)
    if options.get("output_router_logits", configured):
        raise ConfigError(
            f"the balancing loss of {kind} needs what the routers of all layers say, and a stage of pp has its own; "
            "pass output_router_logits=False (config.output_router_logits), or use pp=1 with ep or zero=3"
        )


def _gather(group: dist.ProcessGroup, times: float, forward: Forward, *inputs: Any, **options: Any) -> Any:
    output: Any = forward(*inputs, **options)
    logits = getattr(output, "router_logits", None)
    if isinstance(logits, tuple) and logits:
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
            raise ValueError(
                "the balancing loss of tokens that a mask leaves out is not that of one device when ranks share the "
                "batch; pass output_router_logits=False, or sequences without padding"
            )
        counts = all_gather(torch.tensor([len(logits[0])], device=logits[0].device), 0, group).tolist()
        # One after the other, as if of further layers: a mask is as long as the tokens of one rank.
        gathered = (_GatherRows.apply(one, counts, group, times).split(counts) for one in logits)
        output.router_logits = tuple(rows for layer in gathered for rows in layer)
    return output


class _GatherRows(torch.autograd.Function):
    """The rows of all ranks of a group, as many as each has; the gradient of one's own goes back, so many times."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, counts: list[int], group: dist.ProcessGroup, times: float) -> Tensor:
        first = sum(counts[: dist.get_rank(group)])
        ctx.own, ctx.times = slice(first, first + len(x_NE)), times
        return all_to_all(x_NE.repeat(len(counts), 1), counts, [len(x_NE)] * len(counts), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.own] * ctx.times, None, None, None
