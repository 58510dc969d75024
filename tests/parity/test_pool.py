"""A pool of ranks tells what became of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from meshwright.launch.local import RankError
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool


def _abort() -> None:
    os.abort()


def _read_where_nothing_is() -> None:
    ctypes.string_at(0)


def _end_one(world: World, end: Callable[[], None]) -> None:
    if world.rank == 1:
        end()
    world.sum(torch.ones(1))


@pytest.mark.parametrize(("end", "ended"), [(_abort, "SIGABRT"), (_read_where_nothing_is, "SIGSEGV")])
def test_a_rank_that_a_signal_ends_is_named_with_the_place_where_it_was(end: Callable[[], None], ended: str) -> None:
    with RankPool(2, timeout_s=30) as pool, pytest.raises(RankError) as error:
        pool.run(_end_one, 2, end)
    assert f"ended without a word: {ended}" in str(error.value)
    assert f"in {end.__name__}" in str(error.value)


def _fail_and_abort(world: World) -> None:
    if world.rank == 0:
        raise ValueError("what came first")
    time.sleep(0.1)
    os.abort()


def test_a_rank_that_ends_after_another_has_failed_is_told_as_well() -> None:
    with RankPool(2, timeout_s=30) as pool, pytest.raises(RankError) as error:
        pool.run(_fail_and_abort, 2)
    first, _, second = str(error.value).partition("rank 1 ended without a word: SIGABRT")
    assert "rank 0 of 2 failed" in first
    assert "what came first" in first
    assert "in _fail_and_abort" in second
    # It was played twice, the second time with checks: of the first time nothing is told.
    assert str(error.value).count("what came first") == 2, "the line of code, and what it said"


def test_a_rank_that_is_gone_before_its_work_comes_is_named() -> None:
    with RankPool(2, timeout_s=30) as own:
        own.run(_rank, 2)
        process, _ = own._ranks[1]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(RankError, match="rank 1 of 2 failed:\nended without a word: SIGKILL"):
            own._run(_rank, 2, ())
        assert own.run(_rank, 2) == [0, 1], "it is replaced"


def _rank(world: World) -> int:
    return world.rank
