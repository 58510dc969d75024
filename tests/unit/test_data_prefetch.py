"""The prefetcher: batches in order and ahead of time, errors where they are consumed, no thread left behind."""

from __future__ import annotations

import threading
import time
import traceback

import numpy as np
import pytest
import torch

from meshwright.data.prefetch import Prefetcher


def batch(step: int) -> dict[str, np.ndarray]:
    return {"tokens": np.full((2, 3), step, dtype=np.uint16), "samples": np.arange(step, step + 2)}


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in 10 seconds"
        time.sleep(0.001)


def test_every_step_comes_once_in_order_as_int64_tensors() -> None:
    with Prefetcher(batch, 5, 25) as prefetcher:
        found = list(prefetcher)
    assert [step for step, _ in found] == list(range(5, 25))
    assert all(torch.equal(tensors["tokens"], torch.full((2, 3), step)) for step, tensors in found)
    assert {tensor.dtype for _, tensors in found for tensor in tensors.values()} == {torch.int64}


def test_nothing_to_do_ends_at_once() -> None:
    with Prefetcher(batch, 7, 7) as prefetcher:
        assert list(prefetcher) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_exactly_depth_batches_are_made_ahead(depth: int) -> None:
    made: list[int] = []

    def make(step: int) -> dict[str, np.ndarray]:
        made.append(step)
        return batch(step)

    with Prefetcher(make, 0, 100, depth=depth) as prefetcher:
        wait_until(lambda: len(made) == depth)
        time.sleep(0.05)
        assert len(made) == depth
        next(prefetcher)
        wait_until(lambda: len(made) == depth + 1)
        time.sleep(0.05)
        assert len(made) == depth + 1


def test_the_next_batch_is_made_while_the_last_one_is_used() -> None:
    used = threading.Event()

    def make(step: int) -> dict[str, np.ndarray]:
        if step == 1:
            used.set()
        return batch(step)

    with Prefetcher(make, 0, 10, depth=1) as prefetcher:
        next(prefetcher)
        assert used.wait(10)


def test_an_error_comes_after_the_batches_before_it_with_its_own_traceback() -> None:
    def make(step: int) -> dict[str, np.ndarray]:
        if step == 2:
            broken_on_purpose()
        return batch(step)

    def broken_on_purpose() -> None:
        raise OSError("disk gone")

    with Prefetcher(make, 0, 10) as prefetcher:
        assert [next(prefetcher)[0], next(prefetcher)[0]] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone") as error:
                next(prefetcher)
            assert "broken_on_purpose" in "".join(traceback.format_tb(error.value.__traceback__))


def test_close_stops_the_thread_when_the_queue_is_full_and_when_it_is_not() -> None:
    before = threading.active_count()
    full = Prefetcher(batch, 0, 1000, depth=2)
    wait_until(lambda: len(full._ready) == 2)
    start = time.monotonic()
    full.close()
    full.close()
    slow = Prefetcher(lambda step: (time.sleep(0.05), batch(step))[1], 0, 1000)
    slow.close()
    assert time.monotonic() - start < 2
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="was closed"):
        next(full)


def test_leaving_the_block_by_an_error_stops_the_thread() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Prefetcher(batch, 0, 1000):
        raise KeyError
    assert threading.active_count() == before


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(batch, 0, 1, depth=0)


def test_a_tensor_does_not_change_when_its_array_does() -> None:
    reused = np.zeros(4, dtype=np.int64)

    def make(step: int) -> dict[str, np.ndarray]:
        reused[:] = step
        return {"tokens": reused}

    with Prefetcher(make, 0, 4, depth=2) as prefetcher:
        wait_until(lambda: len(prefetcher._ready) == 2)
        assert [tensors["tokens"].tolist() for _, tensors in prefetcher] == [[step] * 4 for step in range(4)]
