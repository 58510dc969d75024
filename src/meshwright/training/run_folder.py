"""The run folder: one configuration, its metrics, events and checkpoints. Decides whether a run starts or goes on."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright._version import __version__
from meshwright.checkpoint.format import list_checkpoints, read_manifest
from meshwright.config import AUTO_STEPS, RunConfig, load_config
from meshwright.config_load import format_config
from meshwright.errors import CheckpointError
from meshwright.files import write_atomically
from meshwright.lock import Fence, Lock, LockedError, read_holder, take_lock
from meshwright.secrets import Secrets


class RunFolder:
    """Where a run's files lie."""

    def __init__(self, path: str | Path, secrets: Secrets | None = None) -> None:
        """`secrets` is what no event may hold; where there is no configuration, that of the environment."""
        self.path = Path(path)
        self.secrets = Secrets.known() if secrets is None else secrets
        self.lock = self.path / ".lock"
        self.fence: Fence | None = None
        """What the lock must say for this process to write here; None asks nothing."""
        self._unwritten = False
        """Whether an event could not be written, and was told."""
        self.config = self.path / "config.toml"
        self.identity = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.rollbacks = self.path / "rollbacks.json"
        self.micro_batch = self.path / "micro_batch.json"
        self.plan = self.path / "plan.json"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.tokenizer = self.path / "tokenizer"

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists()

    def check(self, config: RunConfig) -> None:
        """Raise unless a run of this configuration may start or go on here."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"run.dir={self.path} is a file; name a folder")
        if not self.path.exists():
            return
        if not self.holds_run:
            # Names with a dot, and these two, are the lock and what a crash before the first configuration may leave.
            beside = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
            if beside - {self.identity.name, self.events.name}:
                raise CheckpointError(f"run.dir={self.path} holds files that are not a run's; choose another run.dir")
            return
        if config.run.fresh:
            return
        if differing := _differences(load_config(self.config).identity(), config.identity()):
            raise CheckpointError(
                f"{self.path} holds a run of another configuration:\n    "
                + "\n    ".join(differing)
                + "\n  Choose another run.dir to start a new run, --fresh to set the old run aside, "
                "or give the old settings to go on with it."
            )

    def hold(self, fresh: bool, fence: Fence | None = None) -> Lock:
        """Make the folder if need be, an old run moved aside if asked, and keep others out; gives the lock to keep."""
        fence = fence or Fence(launch=os.urandom(8).hex())
        try:
            if fresh and self.holds_run:
                with take_lock(self.lock, fence):
                    self.path.resolve().rename(self._aside())
            self.path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(self.lock, fence)
            lock.write(fence)
            if not self.identity.exists():
                identity = {"run": self._former_id() or uuid.uuid4().hex, "began": round(time.time(), 3)}
                write_atomically(self.identity, json.dumps(identity) + "\n")
        except OSError as error:
            raise CheckpointError(f"run.dir={self.path} cannot be written: {error.strerror}; choose another") from None
        self.fence = fence
        return lock

    def check_generation(self) -> None:
        """Raise unless this process may still write here: called before anything that others would see."""
        if self.fence is None:
            return
        holder = read_holder(self.lock)
        if holder is not None and (holder.launch, holder.generation) != (self.fence.launch, self.fence.generation):
            raise LockedError(
                f"{self.path} belongs to {holder} now; {self.fence} was replaced and writes nothing more there"
            )

    def _former_id(self) -> str:
        """The run that the checkpoints here say they belong to, should the file that tells be lost."""
        for folder in reversed(list_checkpoints(self.checkpoints)):
            with suppress(CheckpointError):
                return read_manifest(folder).run
        return ""

    def run_id(self) -> str:
        """What tells this run from all others: made by the first rank when it takes the folder."""
        try:
            return str(json.loads(self.identity.read_bytes())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(f"{self.identity} cannot be read; restore it from a copy of the run") from None

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration."""
        header = f"# The resolved configuration of this run, written by meshwright {__version__}.\n"
        # The next start of this folder goes on with the run, whether or not this one started it anew.
        settled = config.model_copy(update={"run": config.run.model_copy(update={"fresh": False})})
        write_atomically(self.config, header + format_config(settled))

    def _aside(self) -> Path:
        """A free name beside the folder; what was set aside before stays."""
        path = self.path.resolve()
        names = (path.with_name(f"{path.name}.previous-{number}") for number in itertools.count(1))
        return next(name for name in names if not name.exists())

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl; one that cannot be written is told, once, and ends no training."""
        line = {"time": round(time.time(), 3), "event": kind, **facts}
        data = json.dumps(self.secrets.redact_tree(line)).encode() + b"\n"
        try:
            with self.events.open("a+b") as file:
                # A crash or a full disk may have cut the line before short, in this process or in another.
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    data = data if file.read(1) == b"\n" else b"\n" + data
                file.write(data)
        except OSError as error:
            self._tell_unwritten(kind, error)

    def _tell_unwritten(self, kind: str, error: OSError) -> None:
        if self._unwritten:
            return
        self._unwritten = True
        with suppress(OSError, ValueError):
            print(
                f"meshwright: {self.events} cannot be written: {error.strerror or error}; the event '{kind}' is "
                "not recorded, nor are later ones until it can; the run goes on",
                file=sys.stderr,
                flush=True,
            )

    def read_events(self) -> list[dict[str, Any]]:
        """The events that can be read, in order; lines that were cut short are left out."""
        try:
            lines = self.events.read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError):
                found.append(json.loads(line))
        return [event for event in found if isinstance(event, dict) and "event" in event]

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that can be read, in order."""
        try:
            lines = self.metrics.read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if _step_of(line) is not None]

    def last_recorded_step(self) -> int:
        """The last step that metrics.jsonl tells of; 0 where it tells of none."""
        try:
            lines = self.metrics.read_text().splitlines()
        except OSError:
            return 0
        return max((_step_of(line) or 0 for line in lines), default=0)

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that will be computed again."""
        if not self.metrics.exists():
            return
        text = self.metrics.read_text()
        lines = text.splitlines()
        kept = [line for line in lines if _step_of(line) is not None and (_step_of(line) or 0) <= step]
        whole = "".join(line + "\n" for line in kept)
        if whole != text:
            write_atomically(self.metrics, whole)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None  # A line that a crash cut short.


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{section}.{key} was {old[section].get(key)!r}, now {value!r}"
        for section, values in new.items()
        for key, value in values.items()
        if old[section].get(key) != value and not _is_settled((section, key), (old[section].get(key), value))
    ]


def _is_settled(name: tuple[str, str], values: tuple[Any, Any]) -> bool:
    """Whether a difference is one between a number and what follows from the run: its checkpoints say what that is."""
    return name == ("comm", "compress_after") and AUTO_STEPS in values
