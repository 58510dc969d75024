"""The GPU's cross-entropy, interpreted, is that of float64; its gradient takes the place of the logits alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.cross_entropy import IGNORED
from meshwright.models.cross_entropy_kernel import losses_and_gradient_, scale_

FACTOR = 0.25


def drawn(rows: int, entries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits that are the first columns of something wider, and targets."""
    draw = torch.Generator().manual_seed(rows + entries)
    wide = 4 * torch.randn(rows, entries + 5, generator=draw)
    targets = torch.randint(entries, (rows,), generator=draw)
    targets[-1] = entries - 1
    return wide.to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("entries", [1, 3, 17, 1069, 4096, 4097, 9001])
def test_losses_and_gradients_are_those_of_float64(entries: int, dtype: torch.dtype) -> None:
    wide, targets = drawn(6, entries, dtype)
    targets[2] = IGNORED
    beside, logits = wide[:, entries:].clone(), wide[:, :entries]
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    (FACTOR * expected).sum().backward()
    losses, gradient = losses_and_gradient_(logits, targets, torch.tensor([FACTOR]), learns=True)
    assert exact.grad is not None
    assert gradient is not None
    assert gradient.data_ptr() == wide.data_ptr()
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    assert torch.allclose(gradient.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert not gradient[2].any()
    assert torch.equal(wide[:, entries:], beside)


def test_what_is_only_evaluated_is_not_overwritten() -> None:
    wide, targets = drawn(3, 40, torch.bfloat16)
    logits = wide[:, :40]
    before = wide.clone()
    losses, gradient = losses_and_gradient_(logits, targets, torch.tensor([FACTOR]), learns=False)
    assert gradient is None
    assert torch.equal(wide, before)
    assert losses.tolist() == pytest.approx(F.cross_entropy(logits.float(), targets, reduction="none").tolist())


def test_rows_without_a_target_have_no_loss_and_no_gradient() -> None:
    wide, targets = drawn(4, 4100, torch.bfloat16)
    losses, gradient = losses_and_gradient_(
        wide[:, :4100], torch.full_like(targets, IGNORED), torch.tensor([FACTOR]), learns=True
    )
    assert gradient is not None
    assert not losses.any()
    assert not gradient.any()


@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0])
def test_values_are_multiplied_where_they_are(factor: float) -> None:
    values = torch.randn(3, 2000).bfloat16()
    expected = values.float() * factor
    scale_(values, torch.tensor([factor]))
    assert torch.allclose(values.float(), expected, rtol=torch.finfo(values.dtype).eps, atol=0)
