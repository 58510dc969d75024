"""A profile of one step: what it has seen, and that nothing of it stays where nobody collects garbage."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
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


CALLING = """
import torch, torch.distributed as dist
from meshwright.observe.issued import Group
from meshwright.observe.step_profile import StepProfile

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def problem(count):
    profile = StepProfile(torch.device("cpu"), {"0": Group("dp", 1)}, None)
    profile.start()
    for _ in range(count):
        dist.all_reduce(torch.ones(1))
    return profile.stop().problem

print([problem(2500 * turn + 20) for turn in range(2)])
print([problem(20)])
"""


def test_a_step_with_more_collectives_than_torch_keeps_says_what_to_set() -> None:
    """In a process of its own: the recorder of torch is one for all that a process does."""
    ran = subprocess.run([sys.executable, "-c", CALLING], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    told, after = (ast.literal_eval(line) for line in ran.stdout.splitlines())
    assert told[0] == ""
    assert "TORCH_FR_BUFFER_SIZE=8000" in told[1]
    # Calls of earlier steps may go.
    assert after == [""]
