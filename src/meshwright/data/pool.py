"""Hands shards to worker processes and gathers what they answer.

Workers are fresh interpreters, not forks: they import neither torch nor the caller's script, whatever the
caller has loaded, and share nothing with it but two pipes. A worker that dies is an error at once.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import meshwright
from meshwright.data.pack import shard_name
from meshwright.data.shards import Shard
from meshwright.data.sources import Unit
from meshwright.errors import DataError

_START = "import sys; sys.path.append(sys.argv[1]); from meshwright.data.worker import main; main()"


def make_shards(
    shards: Mapping[int, Sequence[Unit]],
    setup: Mapping[str, Any],
    workers: int,
    lock: int,
    report: Callable[[int, int], None],
) -> dict[int, Shard]:
    """Make numbered shards on that many processes; the workers hold `lock` too, so it is free when they are gone."""
    waiting = deque(shards)
    made: dict[int, Shard] = {}
    with _processes(min(workers, len(shards)), lock) as processes, selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, worker := _Worker(process))
            worker.send(setup)
            worker.take(waiting, shards)
        while len(made) < len(shards):
            for key, _ in selector.select():
                worker = key.data
                for answer in worker.answers():
                    if "error" in answer:
                        raise _failure(answer)
                    if "shard" in answer:
                        made[answer["number"]] = Shard(**answer["shard"])
                        worker.take(waiting, shards)
                    else:
                        report(answer["read"], answer["tokens"])
                if worker.closed:
                    raise _death(worker)
    return made


class _Worker:
    """The parent's end of one worker."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.number: int | None = None
        self.closed = False
        self._rest = b""

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead: what it said last, or that it ended, is still to be read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def take(self, waiting: deque[int], shards: Mapping[int, Sequence[Unit]]) -> None:
        self.number = waiting.popleft() if waiting else None
        if self.number is not None:
            self.send({"number": self.number, "units": shards[self.number]})

    def answers(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(json.loads, lines)


@contextmanager
def _processes(count: int, lock: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Worker processes that are gone when the block is left, however it is left."""
    processes: list[subprocess.Popen[bytes]] = []
    root = str(Path(meshwright.__file__).parent.parent)
    # One thread a worker: the pool already uses every core that was asked for.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        while len(processes) < count:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=(lock,),
                process_group=0,  # Ctrl-C reaches the caller alone, who ends the workers
            )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()  # safe at any moment: a shard has its name only when it is whole
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def _failure(answer: Mapping[str, Any]) -> Exception:
    if answer["error"] == "data":
        return DataError(answer["text"])
    if answer["error"] == "system":
        return OSError(answer["code"], answer["text"], answer["file"])
    return RuntimeError(f"a worker failed:\n{answer['text']}")


def _death(worker: _Worker) -> DataError:
    status = worker.process.wait()
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    doing = "before its first shard" if worker.number is None else f"while it made {shard_name(worker.number)}"
    return DataError(
        f"a worker process {how} {doing}; if memory ran out, use fewer --workers. "
        "Finished shards are kept: run the same command again to go on"
    )
