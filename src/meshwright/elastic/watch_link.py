"""The supervisor's side of the watchdog: a process of its own that follows the ranks' pulses and says who hangs.

It is given the folder with the pulses (`<rank>.pulse`) and `ranks.json`, and writes lines of JSON to its output:
{"kind": "hang" | "warning" | "cleared", "ranks": [...], "report": "path", "text": "..."}.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.elastic.ranks import end_with_parent


@dataclass(frozen=True)
class Verdict:
    """What the watchdog says."""

    kind: str
    """hang: the ranks will not go on by themselves; warning, cleared and others are for a person to know."""
    ranks: tuple[int, ...]
    text: str
    report: str | None = None
    generation: int | None = None
    """Of which ranks it is said, if of any."""
    elsewhere: dict[str, Any] = field(default_factory=dict)
    """Of a guilty rank on another machine: its host, step, phase and for how long it has been there (`detect_s`)."""


class WatchLink:
    """A watchdog that runs, and what it has said."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = [*command, str(folder)]
        self._rest = b""
        self.restarts = 0
        """How often it was started again."""
        self._start()

    def _start(self) -> None:
        # It ends when its input does.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, preexec_fn=_in_child)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def fileno(self) -> int:
        """Readable when it has said something."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def verdicts(self) -> list[Verdict]:
        """What it has said since the last time."""
        assert self._process.stdout is not None
        self._rest += self._process.stdout.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            try:
                said = json.loads(line)
                ranks = tuple(map(int, said.get("ranks", ())))
                report, generation = said.get("report"), said.get("generation")
                elsewhere = said.get("elsewhere", {})
                found.append(Verdict(str(said["kind"]), ranks, str(said["text"]), report, generation, elsewhere))
            except (ValueError, KeyError, TypeError, AttributeError):
                found.append(Verdict("warning", (), f"the watchdog said something else: {line[:200]!r}"))
        return found

    def restart(self) -> None:
        """Let it begin anew: what it has learned of time no longer holds, or it has ended."""
        self.close()
        self._rest = b""
        self.restarts += 1
        self._start()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _in_child() -> None:
    # Ctrl-C is the supervisor's to answer.
    os.setpgrp()
    end_with_parent()
