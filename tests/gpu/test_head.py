"""The head's loss on a GPU, by its own kernel: near float64, whatever the size of the vocabulary and of chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models import logit_chunks
from meshwright.models.cross_entropy import IGNORED
from meshwright.models.head import Head, Targets

WIDTH = 64


def apart(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None
    assert exact is not None
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("entries", [29, 4096, 4097, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_and_gradients_are_near_float64(
    dtype: torch.dtype, entries: int, bias: bool, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunks == "many chunks":
        monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    draw = torch.Generator("cuda").manual_seed(1)
    head = Head(WIDTH, entries, bias=bias, device="cuda")
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, device="cuda", generator=draw).to(dtype).float()
    x = torch.randn(2, 300, WIDTH, device="cuda", generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(entries, (2, 300), device="cuda", generator=draw)
    targets[0, :3] = torch.tensor([0, entries - 1, IGNORED])
    loss = head(x, Targets(targets, torch.tensor(1 / 600, device="cuda")))
    # What came after it in the graph, if anything did.
    (2 * loss).backward()
    wide = Head(WIDTH, entries, bias=bias, device="cuda", dtype=torch.float64)
    wide.load_state_dict(head.state_dict())
    exact = x.detach().double().requires_grad_()
    logits = F.linear(exact, wide.weight, wide.bias)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / 600
    (2 * expected).backward()
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert float(loss) == pytest.approx(float(expected), rel=near / 10)
    assert apart(x.grad, exact.grad) < near
    for ours, theirs in zip(head.parameters(), wide.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float32
        assert apart(ours.grad, theirs.grad) < near
