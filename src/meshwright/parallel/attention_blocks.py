"""Attention of some queries to some keys, as one block of a larger softmax: its share, and the gradient of that.

A block gives its output and the log-sum-exp of its scores; blocks are merged by the latter. Going backward, the kernel
is given the output and the log-sum-exp of the whole, with which its probabilities are those of the whole softmax.

PyTorch's flash kernels do it on CPUs (all dtypes) and GPUs (16 bits); plain matrix products do what they cannot:
masks, and wider dtypes on GPUs. Grouped queries go in as they are. Shapes: as in `models.attention`, K for KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.torch_private import FlashAttention, flash_attention


def attend_block(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, mask_BTS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The block's output and log-sum-exp (B, H, T), in float32 or wider; a query without keys gets 0 and -inf."""
    flash = _flash(q_BHTD, mask_BTS)
    if flash is not None:
        return flash.forward(q_BHTD, k_BKSD, v_BKSD, causal)
    scores_BKGTS = _scores(q_BHTD, k_BKSD, causal, mask_BTS)
    lse_BKGT = scores_BKGTS.logsumexp(dim=-1)
    weights = (scores_BKGTS - lse_BKGT.nan_to_num(neginf=0.0)[..., None]).exp_()
    out_BKGTD = weights @ v_BKSD.to(weights.dtype)[:, :, None]
    return out_BKGTD.flatten(1, 2).to(q_BHTD.dtype), lse_BKGT.flatten(1, 2)


def attend_block_backward(
    gradient_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    causal: bool,
    mask_BTS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of queries, keys and values; `out` and `lse` are those of the whole softmax."""
    if gradient_BHTD.stride(-1) != 1:
        gradient_BHTD = gradient_BHTD.contiguous()
    flash = _flash(q_BHTD, mask_BTS)
    if flash is not None:
        return flash.backward(gradient_BHTD, q_BHTD, k_BKSD, v_BKSD, out_BHTD, lse_BHT, causal)
    scores_BKGTS = _scores(q_BHTD, k_BKSD, causal, mask_BTS)
    width, groups = scores_BKGTS.dtype, (k_BKSD.shape[1], -1)
    gradient, q, out = (x.to(width).unflatten(1, groups) for x in (gradient_BHTD, q_BHTD, out_BHTD))
    k, v = (x.to(width)[:, :, None] for x in (k_BKSD, v_BKSD))
    weights = (scores_BKGTS - lse_BHT.unflatten(1, groups)[..., None]).exp_()
    dv = (weights.mT @ gradient).sum(dim=2)
    inner = gradient @ v.mT - (gradient * out).sum(dim=-1, keepdim=True)
    of_scores = weights.mul_(inner).mul_(q.shape[-1] ** -0.5)
    dq, dk = (of_scores @ k).flatten(1, 2), (of_scores.mT @ q).sum(dim=2)
    return dq.to(q_BHTD.dtype), dk, dv


def _flash(q: Tensor, mask: Tensor | None) -> FlashAttention | None:
    # The kernel for CPUs ends the process when there are no queries.
    return flash_attention(q) if mask is None and q.shape[2] else None


def _scores(q_BHTD: Tensor, k_BKSD: Tensor, causal: bool, mask_BTS: Tensor | None) -> Tensor:
    """(B, K, G, T, S), G being the query heads of a KV head; in float32 or wider, -inf where there is no attention."""
    width = torch.float64 if q_BHTD.dtype == torch.float64 else torch.float32
    q_BKGTD = q_BHTD.to(width).unflatten(1, (k_BKSD.shape[1], -1))
    scores = q_BKGTD @ k_BKSD.to(width)[:, :, None].mT
    scores.mul_(q_BHTD.shape[-1] ** -0.5)
    if causal:
        mask_BTS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None]
    if mask_BTS is not None:
        scores.masked_fill_(~mask_BTS[:, None, None], float("-inf"))
    return scores
