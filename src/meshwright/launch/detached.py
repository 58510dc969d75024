"""A command that goes on when whoever started it is gone: its output in a file, and how it ended in another.

    python -m meshwright.launch.detached FOLDER NAME -- COMMAND...

FOLDER/NAME.log has its output; FOLDER/NAME.json its process and, once it has ended, its exit code. Returns when the
command was started. Processes are told apart by id and by when they began, so that another one which was given the same
id later is never taken for it. Runs on its own on a machine that was reached by ssh; no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.files import write_atomically
from meshwright.launch.lines import lines_of

Facts = dict[str, Any]


def start(folder: Path, name: str, command: list[str]) -> Facts:
    """Start it; gives its facts."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.unlink(missing_ok=True)
    inner = [sys.executable, "-m", "meshwright.launch.detached", "--within", str(folder), name, "--", *command]
    with (folder / f"{name}.log").open("ab") as log, open(os.devnull, "rb") as nothing:
        process = subprocess.Popen(inner, stdin=nothing, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 30
    while (facts := read(folder, name)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"{command[0]} was not started; {folder / name}.log says why")
        time.sleep(0.05)
    return facts


def read(folder: Path, name: str) -> Facts | None:
    """The facts of one that was started, if it was and they are whole."""
    try:
        facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and {"pid", "began"} <= facts.keys() else None


def state(folder: Path, name: str) -> tuple[str, int | None]:
    """ "running", "ended" with its code, or "lost": gone without having said how."""
    for _ in range(2):
        # Looked at twice: it may write how it ended in between.
        facts = read(folder, name)
        if facts is not None and facts.get("code") is not None:
            return "ended", int(facts["code"])
        if facts is not None and _is_alive(facts):
            return "running", None
        time.sleep(0.1)
    return "lost", None


def send(folder: Path, name: str, number: int) -> bool:
    """Send it a signal, if it is still there."""
    facts = read(folder, name)
    if facts is None or facts.get("code") is not None or not _is_alive(facts):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(facts["pid"]), number)
        return True
    return False


def _is_alive(facts: Facts) -> bool:
    return _began(int(facts["pid"])) == facts["began"]


def _began(pid: int) -> str | None:
    """What tells a process from others of the same id; None where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"


def _within(folder: Path, name: str, command: list[str]) -> int:
    """Be the process beside the command: pass signals on, write how it ended."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: child.send_signal(number))
    facts: Facts = {"pid": os.getpid(), "began": _began(os.getpid()), "command": command, "code": None}
    write_atomically(folder / f"{name}.json", json.dumps(facts) + "\n")
    code = child.wait()
    write_atomically(folder / f"{name}.json", json.dumps({**facts, "code": code}) + "\n")
    return code


def main(words: list[str]) -> int:
    """The command line: start one; or look at one, or send it a signal, for who has come by ssh."""
    match words:
        case ["--within", folder, name, "--", *command]:
            return _within(Path(folder), name, command)
        case ["--state", folder, name]:
            print(json.dumps(state(Path(folder), name)))
            return 0
        case ["--follow", folder, name]:
            place = Path(folder)
            for line in lines_of([place / f"{name}.log"], lambda: state(place, name)[0] == "running"):
                print(line, flush=True)
            return 0
        case ["--send", folder, name, number]:
            print(json.dumps(send(Path(folder), name, int(number))))
            return 0
        case [folder, name, "--", *command] if command:
            print(json.dumps(start(Path(folder), name, command)))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
