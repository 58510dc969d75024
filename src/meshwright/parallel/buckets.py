"""Buckets of gradients on their way over data-parallel ranks: DDP's communication hooks.

The backend's own all-reduce runs beside the backward pass by itself. What takes several exchanges (algorithms over
messages, compression) runs in a thread of its own, bucket after bucket, in the order in which DDP hands them out: the
same on all ranks. It has a process group of its own, since the backward pass may use the other one meanwhile.
"""

# No `from __future__ import annotations` here: torch reads the communication hook's annotations as types.
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.compression import NONE, Compression
from meshwright.comm.compressors import Bucket, Compressor, compressor, sum_in
from meshwright.comm.sums import sum_over
from meshwright.comm.travel import BACKEND, Travel
from meshwright.parallel.precision import Precision
from meshwright.parallel.torch_releases import GradBucket, group_of

Reduce = Callable[[Bucket], None]
"""Puts the sum over ranks in the place of a bucket's gradients."""


def register(
    replica: DistributedDataParallel,
    group: dist.ProcessGroup,
    travel: Travel,
    compression: Compression,
    precision: Precision,
    mean: bool,
) -> Compressor | None:
    """Let the gradients of a replica travel so, to their mean or sum; gives what compresses them on their way."""
    scale, dtype = 1.0 / group.size() if mean else 1.0, precision.reduce
    if compression.kind == NONE and travel.all_reduce == BACKEND:
        # A mean of gradients as they are is what DDP does by itself.
        if not mean or dtype != precision.stored:
            replica.register_comm_hook(_Whole(group, dtype, scale), _reduce)
        return None
    own = group_of(dist.get_process_group_ranks(group))
    names: dict[Tensor, str] = {parameter: name for name, parameter in replica.module.named_parameters()}
    total = sum_over(own, travel.all_reduce)
    compressing = None if compression.kind == NONE else compressor(compression, own, total, dtype)
    if compressing is not None:
        compressing.whole_steps = travel.whole_steps(compression)
    pieces = partial(_piece_by_piece, compressing, travel.bucket_bytes) if compressing else None
    reduce: Reduce = pieces or (lambda bucket: sum_in(dtype, bucket.flat, total))
    replica.register_comm_hook(_InTurn(reduce, names, scale), _reduce_in_turn)
    return compressing


def _piece_by_piece(reduce: Reduce, limit: float, bucket: Bucket) -> None:
    """Reduce what travels together, and no more: in a process's first step DDP has all gradients in one bucket."""
    start, first, count = 0, 0, 0
    for index, gradient in enumerate(bucket.gradients):
        count += gradient.numel()
        if count * bucket.flat.element_size() >= limit or index + 1 == len(bucket.gradients):
            after = index + 1
            flat = bucket.flat[start : start + count]
            reduce(Bucket(flat, bucket.gradients[first:after], bucket.names[first:after]))
            start, first, count = start + count, after, 0


@dataclass
class _Whole:
    """How the backend reduces a bucket: in which group and dtype, multiplied by what."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    scale: float


def _reduce(how: _Whole, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    held = bucket.buffer()
    sent = held.to(how.dtype)
    if how.scale != 1.0:
        sent.mul_(how.scale)
    work = dist.all_reduce(sent, group=how.group, async_op=True)
    return work.get_future().then(lambda future: held.copy_(future.value()[0]))


class _InTurn:
    """Reduces buckets one after the other, in a thread beside the backward pass."""

    def __init__(self, reduce: Reduce, names: Mapping[Tensor, str], scale: float) -> None:
        self._reduce, self._names, self._scale = reduce, names, scale
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._stream: torch.cuda.Stream | None = None

    def begin(self, taken: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket soon; its gradients are ready as far as later work on this device can tell."""
        flat = taken.buffer()
        bucket = Bucket(flat, taken.gradients(), [self._names[one] for one in taken.parameters()])
        if flat.device.type != "cuda":
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            self._thread.submit(self._run, bucket, done)
            return done
        done = torch.futures.Future(devices=[flat.device])
        self._stream = self._stream or torch.cuda.Stream(flat.device)
        self._thread.submit(
            self._run_on, self._stream, torch.cuda.current_stream(flat.device).record_event(), bucket, done
        )
        return done

    @torch.no_grad()
    def _run(self, bucket: Bucket, done: torch.futures.Future[Tensor]) -> None:
        try:
            if self._scale != 1.0:
                bucket.flat.mul_(self._scale)
            self._reduce(bucket)
        # Whatever it is, it ends the backward pass, which waits for this.
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]
        else:
            done.set_result(bucket.flat)

    def _run_on(
        self, stream: torch.cuda.Stream, ready: torch.cuda.Event, bucket: Bucket, done: torch.futures.Future[Tensor]
    ) -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._run(bucket, done)


def _reduce_in_turn(how: _InTurn, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return how.begin(bucket)
