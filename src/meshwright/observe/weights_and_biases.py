"""Weights & Biases: each step's metrics, under the tags that TensorBoard gets too, sent by a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshwright.observe.export import Exporter, Record
from meshwright.secrets import public
from meshwright.training.loop import TrainingLoop


class WeightsAndBiases(Exporter):
    """Sends metrics to the wandb run that its own environment variables (WANDB_PROJECT, WANDB_MODE, ...) describe."""

    name = "Weights & Biases"

    def __init__(self, trainer: TrainingLoop) -> None:
        folder = trainer.job.folder.path
        config = public(trainer.config.model_dump(mode="json"))
        self._arguments = {"name": folder.name, "dir": str(folder.resolve()), "config": config}
        command = [sys.executable, "-m", "meshwright.observe.wandb_sender"]
        # A session of its own: a signal to the ranks is not one to it, and it is ended with all that it has started.
        self._sender = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def open(self) -> None:
        self._write(self._arguments)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._write([record.step, record.values])

    def close(self, completed: bool) -> None:
        self._write(completed)
        if code := self._sender.wait():
            raise RuntimeError(f"its process ended with exit code {code}")

    def abandon(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._sender.pid, signal.SIGKILL)

    def _write(self, message: Any) -> None:
        assert self._sender.stdin is not None
        try:
            self._sender.stdin.write(json.dumps(message) + "\n")
            self._sender.stdin.flush()
        except OSError:
            raise RuntimeError(f"its process ended with exit code {self._sender.wait()}") from None
