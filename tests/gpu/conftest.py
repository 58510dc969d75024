"""Ranks that share this machine's GPUs over gloo: fresh interpreters, started once for all tests (`make test-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from meshwright.verify.parity import Prover
from meshwright.verify.pool import RankPool


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU, and PyTorch sees none; everything else is run by `make test`")


@pytest.fixture(autouse=True)
def compiles_afresh() -> None:
    """Layers of one test's model are not compiled as variants of another's."""
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4, device="cuda-shared") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def prover(pool: RankPool) -> Prover:
    return Prover(pool)
