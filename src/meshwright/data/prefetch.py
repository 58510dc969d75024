"""Makes the batches of the next steps in a background thread, as tensors ready for the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensors = dict[str, torch.Tensor]


class Prefetcher:
    """Yields `(step, tensors)` for each step in order, up to `depth` of them made ahead of their use."""

    def __init__(
        self,
        make: Callable[[int], Mapping[str, NDArray[Any]]],
        start_step: int,
        stop_step: int,
        depth: int = 2,
        pin: bool = False,
    ) -> None:
        if depth < 1:
            raise ValueError(f"a prefetcher of depth {depth}; it must be at least 1")
        self._make, self._pin, self._depth = make, pin, depth
        self._next, self._stop = start_step, stop_step
        self._ready: deque[tuple[int, Tensors]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(start_step,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, start: int) -> None:
        try:
            for step in range(start, self._stop):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                tensors = {name: _tensor(array, self._pin) for name, array in self._make(step).items()}
                with self._changed:
                    self._ready.append((step, tensors))
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[int, Tensors]]:
        return self

    def __next__(self) -> tuple[int, Tensors]:
        with self._changed:
            if self._next >= self._stop:
                raise StopIteration
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher was closed")
            if not self._ready:
                assert self._failure is not None
                raise self._failure  # with the traceback of the thread
            self._next += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Stop the thread and wait for it; a batch that is being made is finished first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensor(array: NDArray[Any], pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array, dtype=np.int64))  # a copy: `make` may use its array again
    return tensor.pin_memory() if pin else tensor
