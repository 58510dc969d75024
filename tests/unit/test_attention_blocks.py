"""Blocks of a softmax, merged by their log-sum-exp, are the whole softmax; so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.models.attention import attend
from meshwright.parallel.attention_blocks import attend_block, attend_block_backward

KINDS = [("cpu", torch.float64, 1e-12), ("cpu", torch.float32, 1e-5), ("cpu", torch.bfloat16, 3e-2)]
if torch.cuda.is_available():
    KINDS += [("cuda", torch.float64, 1e-12), ("cuda", torch.float32, 1e-4), ("cuda", torch.bfloat16, 3e-2)]
TOKENS, EARLIER = 11, 6


def tensors(device: str, dtype: torch.dtype, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(2, TOKENS, heads, 16) for heads in (4, kv_heads, kv_heads, 4)]
    return tuple(torch.randn(shape, dtype=dtype, device=device).transpose(1, 2) for shape in shapes)


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)


def in_two_blocks(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, masked: bool) -> tuple[Tensor, ...]:
    """The last queries' output and gradients, from the keys before them and from their own."""
    last, mine = slice(EARLIER, TOKENS), q[:, :, EARLIER:]
    causal_TS = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool, device=q.device).tril()[:, EARLIER:]
    blocks = []
    for where, causal in ((slice(0, EARLIER), False), (last, True)):
        mask = causal_TS[..., where] if masked else None
        blocks.append(((k[:, :, where], v[:, :, where]), {"causal": causal and not masked, "mask_BTS": mask}))
    found = [attend_block(mine, *keys, **how) for keys, how in blocks]
    lse = torch.logaddexp(found[0][1], found[1][1])
    out = sum(part * (one - lse).exp()[..., None] for part, one in found).to(q.dtype)
    parts = [attend_block_backward(gradient[:, :, last], mine, *keys, out, lse, **how) for keys, how in blocks]
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([part[index] for part in parts], dim=2) for index in (1, 2))
    return out, dq, dk, dv


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("device", "dtype", "bound"), KINDS)
def test_blocks_make_up_the_whole(device: str, dtype: torch.dtype, bound: float, kv_heads: int, masked: bool) -> None:
    q, k, v, gradient = tensors(device, dtype, kv_heads)
    found = in_two_blocks(q, k, v, gradient, masked)
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend(*whole)[:, :, EARLIER:]
    expected.backward(gradient.double()[:, :, EARLIER:])
    close(found[0], expected.detach(), bound)
    close(found[1], whole[0].grad[:, :, EARLIER:], bound)
    close(found[2], whole[1].grad, bound * 4)
    close(found[3], whole[2].grad, bound * 4)


def test_a_query_without_keys_adds_nothing_and_has_no_gradient() -> None:
    q, k, v, gradient = tensors("cpu", torch.float64)
    mask = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool)
    mask[0, 3] = False
    out, lse = attend_block(q, k, v, causal=False, mask_BTS=mask)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -torch.inf).all()
    assert out.isfinite().all()
    # It has met keys elsewhere: the log-sum-exp of the whole is a number.
    dq, dk, dv = attend_block_backward(gradient, q, k, v, out, lse.nan_to_num(), causal=False, mask_BTS=mask)
    assert (dq[:, :, 3] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_no_queries_at_all_give_nothing_and_zero_gradients() -> None:
    q, k, v, gradient = (x[:, :, :TOKENS] for x in tensors("cpu", torch.float64))
    none = slice(0, 0)
    out, lse = attend_block(q[:, :, none], k, v, causal=False, mask_BTS=None)
    assert out.shape == (2, 4, 0, 16)
    assert lse.shape == (2, 4, 0)
    _, dk, dv = attend_block_backward(gradient[:, :, none], q[:, :, none], k, v, out, lse, causal=False, mask_BTS=None)
    assert dk.shape == k.shape
    assert not torch.cat((dk, dv)).any()
