"""Rows taken in another order and put back: values and gradients are those of plain indexing; little is kept."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.rows import put_rows, take_rows


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("taken", [0, 1, 7, 12])
def test_rows_and_gradients_are_those_of_indexing(times: int, taken: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(12 * times)[: taken * times]
    weights = torch.randn(len(order), 5, dtype=torch.float64)
    found = take_rows(x, order, times)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    expected = x[order // times]
    (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
    assert torch.equal(found, expected)
    torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("put", [0, 1, 7, 12])
def test_rows_are_put_where_they_belong(put: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(put, 5, dtype=torch.float64, requires_grad=True)
    order, weights = torch.randperm(12)[:put], torch.randn(12, 5, dtype=torch.float64)
    found = put_rows(x, order, 12)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    expected = torch.zeros(12, 5, dtype=torch.float64).index_copy(0, order, x)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
    assert torch.equal(found, expected)
    assert torch.equal(gradient, wanted)


def test_only_the_order_is_kept_for_the_backward_pass() -> None:
    x = torch.randn(12, 5, requires_grad=True)
    order = torch.randperm(24)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        put_rows(take_rows(x, order, 2), order, 24)
    assert [tensor.dtype for tensor in kept] == [torch.int64, torch.int64]
