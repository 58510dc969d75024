"""Triton's kernels in its interpreter, which needs no GPU (`make test-kernels`); on one, tests/gpu runs them."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch


def pytest_configure() -> None:
    # Triton decides when it is imported whether it interprets.
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/kernels run in Triton's interpreter: `make test-kernels` installs and sets it")


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches choose the GPU of their tensors, and there is none."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
