"""A command in a session of its own, with a time limit; whatever is left of it at the end is ended. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_limited(
    command: Sequence[str], errors: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> int | None:
    """Run it with its stderr in a file; gives its exit code, None when its time was up."""
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def last_line(errors: Path) -> str:
    """The last line that was said there."""
    lines = [line.strip() for line in errors.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all its processes: asked first, so that a launcher can clear up."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    # Whoever is left of its session.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.05)
