"""Shared by the unit tests.

Properties are not timed, since that would mostly measure the machine's other work.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from torch import Tensor

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """What a checkpoint may hold: every type, a scalar, an empty one, one that is not contiguous."""
    return {
        "model.x": torch.randn(3, 5),
        "model.half": torch.arange(10).to(torch.bfloat16),
        "optimizer.step.x": torch.tensor(4.0),
        "optimizer.none.x": torch.empty(0, 3),
        "optimizer.flags.x": torch.tensor([True, False]),
        "optimizer.count.x": torch.tensor([7], dtype=torch.int64),
        "optimizer.wide.x": torch.randn(4, 2, dtype=torch.float64).T,
    }
