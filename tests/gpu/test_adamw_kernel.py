"""The GPU's AdamW is the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.adamw import compare


@pytest.mark.parametrize("moments", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_is_the_reference_bit_for_bit(dtype: torch.dtype, moments: str) -> None:
    compare(dtype, moments)
