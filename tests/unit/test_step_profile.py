"""A profile of one step: what it has seen, and that nothing of it stays where nobody collects garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.observe.step_profile import StepProfile

CPU = torch.device("cpu")


@pytest.fixture
def without_collection() -> Iterator[None]:
    """As between the collections of a training."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def started() -> tuple[StepProfile, Any]:
    profile = StepProfile(CPU, {}, None)
    profile.start()
    (torch.ones(8, 8) @ torch.ones(8, 8)).sum()
    inner: Any = profile._profile.profiler
    return profile, weakref.ref(inner)


def test_what_was_computed_is_seen() -> None:
    profile, _ = started()
    seen = profile.stop()
    assert seen.compute
    assert all(seen.begin <= begin < end <= seen.end for begin, end in seen.compute)
    assert seen.collectives == []


@pytest.mark.parametrize("ends", ["stop", "drop"])
def test_what_torch_has_recorded_is_gone_with_the_step(ends: str, without_collection: None) -> None:
    profile, inner = started()
    assert inner() is not None
    getattr(profile, ends)()
    assert inner() is None
