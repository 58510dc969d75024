"""The loss: torch's cross-entropy over valid targets, in float32 or wider."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.training.loss import IGNORED, cross_entropy

VOCABULARY = 11
REDUCTIONS = ["mean", "sum", "none"]


def logits_and_targets(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 5)) -> tuple[Tensor, Tensor]:
    """Random ones; about a third of the targets does not count, the very first among them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.3
    ignored.view(-1)[0] = True
    return logits.to(dtype).requires_grad_(), targets.masked_fill(ignored, IGNORED)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_torchs_over_the_targets_that_count(reduction: str, shape: tuple[int, ...]) -> None:
    (ours, targets), (theirs, _) = logits_and_targets(shape=shape), logits_and_targets(shape=shape)
    found = cross_entropy(ours, targets, reduction)
    expected = F.cross_entropy(theirs.view(-1, VOCABULARY), targets.view(-1), reduction=reduction, ignore_index=-100)
    assert found.shape == (targets.shape if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=0, atol=0)
    weight = torch.arange(1.0, found.numel() + 1, dtype=torch.float64)
    (found.flatten() * weight).sum().backward()
    (expected.flatten() * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def test_reductions_are_those_computed_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [5.0, -5.0]]], dtype=torch.float64)
    targets = torch.tensor([[1, 0, IGNORED]])
    losses = [torch.log(torch.tensor(2.0)).item(), torch.log1p(torch.exp(torch.tensor(-1.0))).item()]
    assert cross_entropy(logits, targets, "none").tolist() == [pytest.approx([*losses, 0.0])]
    assert float(cross_entropy(logits, targets, "sum")) == pytest.approx(sum(losses))
    assert float(cross_entropy(logits, targets, "mean")) == pytest.approx(sum(losses) / 2)
    assert float(cross_entropy(logits, targets)) == float(cross_entropy(logits, targets, "mean"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_precision_logits_are_computed_in_float32(reduction: str, dtype: torch.dtype) -> None:
    (ours, targets), (theirs, _) = logits_and_targets(dtype), logits_and_targets(dtype)
    found = cross_entropy(ours, targets, reduction)
    expected = cross_entropy(theirs.float(), targets, reduction)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert ours.grad.dtype == dtype
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_logits_keep_their_dtype(dtype: torch.dtype) -> None:
    assert cross_entropy(*logits_and_targets(dtype)).dtype == dtype


def test_sums_of_parts_of_a_batch_add_up_to_the_mean_of_all() -> None:
    logits, targets = logits_and_targets()
    valid = (targets != IGNORED).sum()
    parts = [cross_entropy(logits[i], targets[i], "sum") for i in range(len(targets))]
    torch.testing.assert_close(sum(parts) / valid, cross_entropy(logits, targets))
    # Sequences have different counts of valid targets, so that a mean of means would be another number.
    means = [cross_entropy(logits[i], targets[i]) for i in range(len(targets))]
    assert not torch.allclose(sum(means) / len(means), cross_entropy(logits, targets))


def test_targets_that_all_do_not_count_add_nothing() -> None:
    logits, _ = logits_and_targets()
    nothing = torch.full((3, 5), IGNORED)
    assert cross_entropy(logits, nothing, "sum").item() == 0
    assert not cross_entropy(logits, nothing, "none").any()
