"""TensorBoard event files, written without the tensorboard package (which brings a server and ten dependencies).

A file is a sequence of records (length, checksum of the length, data, checksum of the data); data is an `Event` message
of protocol buffers, of which scalars need five fields.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

TAGS = {
    "loss": "train/loss",
    "loss_max": "train/loss_max",
    "spike_score": "train/spike_score",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "skipped": "train/skipped",
    "skipped_steps": "train/skipped_steps",
    "nonfinite": "train/nonfinite",
    "spike": "train/spike",
    "expert_load_max": "train/expert_load_max",
    "dropped": "train/dropped",
    "tokens_per_s": "perf/tokens_per_second",
    "tokens_per_s_per_device": "perf/tokens_per_second_per_device",
    "tflops_per_device": "perf/tflops_per_device",
    "mfu": "perf/mfu",
    "peak_memory_gib": "perf/peak_memory_gib",
    "step_s": "perf/step_time_s",
    "pipeline_idle": "perf/pipeline_idle",
    "pipeline_idle_predicted": "perf/pipeline_idle_predicted",
    "sent_mib": "perf/sent_mib",
    "sent_share": "perf/sent_share",
    "eval_loss": "eval/loss",
    "eval_s": "eval/time_s",
}
"""By the name of a metric of a step: all that curves are drawn of."""


class TensorBoard(Hook):
    """Writes each step's metrics for TensorBoard."""

    def __init__(self) -> None:
        self.writer: EventWriter | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first:
            with self._told(trainer):
                self.writer = EventWriter(trainer.job.folder.tensorboard)
                if trainer.resumed_from is not None:
                    self.writer.restart(trainer.step + 1)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self.writer is not None:
            with self._told(trainer):
                self.writer.scalars(trainer.step, {tag: metrics[name] for name, tag in TAGS.items() if name in metrics})

    def at_rollback(self, trainer: TrainingLoop) -> None:
        if self.writer is not None:
            with self._told(trainer):
                self.writer.restart(trainer.step + 1)

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):  # What could not be written was told when it was to be written.
                self.writer.close()

    @contextmanager
    def _told(self, trainer: TrainingLoop) -> Iterator[None]:
        """Curves that cannot be written end no training: metrics.jsonl has the same numbers.

        A file that was cut short gets no more of them, since readers stop there.
        """
        try:
            yield
        except OSError as error:
            self.close()
            self.writer = None
            print(
                f"meshwright: step {trainer.step}: {trainer.job.folder.tensorboard} cannot be written: "
                f"{error.strerror or error}; the run goes on without TensorBoard until it is started again",
                file=sys.stderr,
                flush=True,
            )


class EventWriter:
    """Appends scalars to a new event file in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file: BinaryIO = (folder / name).open("xb")
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def restart(self, step: int) -> None:
        """Have readers drop what earlier files hold from that step on: it is computed again."""
        start = _varint(1, 1)
        self._record(_double(1, time.time()) + _varint(2, step) + _bytes(7, start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add named values of a step."""
        entries = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._record(_double(1, time.time()) + _varint(2, step) + _bytes(5, entries))

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
        self._file.flush()


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return bytes([field << 3 | 5]) + struct.pack("<f", value)
    except OverflowError:  # Beyond float32, which is what the format has.
        return bytes([field << 3 | 5]) + struct.pack("<f", math.copysign(math.inf, value))


def _varint(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _number(value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(value)) + value


def _number(value: int) -> bytes:
    """Seven bits a byte, lowest first; the high bit says that more follow."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as the record format asks."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
    return index


_TABLE = [_entry(index) for index in range(256)]
