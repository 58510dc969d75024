"""Transposes in 8 bits, interpreted, are those of the reference."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.float8 import E4M3, E5M2, cast, transposed
from meshwright.models.float8_kernel import transposed as by_kernel


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (16, 48), (130, 65), (272, 129)])
@pytest.mark.parametrize("scales", [True, False])
def test_transposes_are_those_of_the_reference(dtype: torch.dtype, shape: tuple[int, int], scales: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    values, _ = cast(torch.randn(shape, generator=draw), dtype, by_row=True)
    factors = 0.5 ** torch.randint(0, 12, (shape[0], 1), generator=draw).float() if scales else None
    expected = transposed(values, factors)
    found = by_kernel(values, factors)
    same = found.view(torch.uint8) == expected.view(torch.uint8)
    # The interpreter cuts off what is too small for a normal number, where a GPU rounds.
    small = expected.float().abs() <= torch.finfo(dtype).smallest_normal
    assert bool((same | small).all())
    assert bool(((found.float() - expected.float()).abs() <= torch.finfo(dtype).smallest_normal / 4)[small].all())
