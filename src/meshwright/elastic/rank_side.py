"""What a rank does for those who watch it: it answers when asked where it stands.

- A signal makes it write the Python stacks of all its threads to `<rank>.stacks`, also while it holds the GIL.
- A fatal signal (an abort inside a library, a segmentation fault) leaves the stacks in `<rank>.fatal`.
- A small thread writes to `<rank>.collectives` how far it has come in each process group, twice a second, and when a
  file `ask` has a new number also which collectives it has called lately. The age of what it wrote tells whether the
  rank still lets its threads run.

`Pulse` says which phase a rank is in; this is for the questions that a stuck rank raises.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Asks a rank for its stacks. Not SIGUSR1 or SIGUSR2 where there are others: schedulers send those."""

ANSWERING = "meshwright-answers"
"""The name of the thread that answers."""

PERIOD_S = 0.5
"""Seconds between two looks at the collectives."""

MOST_RECORDS = 400
"""How many of the latest collectives a rank tells of."""


def answer_watchers(folder: Path, rank: int) -> None:
    """From now on this process answers; call it in a rank after it was forked."""
    # Only here: torch takes seconds to import, and a watcher that wants the name of a signal should not wait.
    import meshwright.torch_private  # noqa: F401

    (folder / f"{rank}.last").unlink(missing_ok=True)
    # Files are opened once and kept: a signal handler cannot open any.
    faulthandler.enable((folder / f"{rank}.fatal").open("w"))
    faulthandler.register(STACK_SIGNAL, (folder / f"{rank}.stacks").open("w"), all_threads=True, chain=False)
    if sys.platform == "linux":
        # PR_SET_PTRACER: where only parents may read a process's memory, whoever the parent starts may as well.
        ctypes.CDLL(None).prctl(0x59616D61, os.getppid(), 0, 0, 0)
    threading.Thread(target=_Answers(folder, rank).run, name=ANSWERING, daemon=True).start()


def leave_last_words(folder: Path, rank: int) -> None:
    """Write down which collectives this rank has called lately: for a rank that fails, before it ends."""
    # A rank that fails has something more important to tell than why this did not work.
    with suppress(Exception):
        _write(folder / f"{rank}.last", {"records": Collectives().records()[-20:]})


class Collectives:
    """The process groups of this process and the collectives that it has called, from torch's recorders."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], tuple[str, str]] = {}
        """By recorder and number, the name of a group and what it is for; entries alone tell that."""

    def groups(self) -> list[dict[str, Any]]:
        """How far this rank has come in each group."""
        from meshwright.torch_private import flight_records, group_members

        statuses = [one.get("pg_status", {}) for one in flight_records(with_entries=False)]
        if any((place, key) not in self._names for place, status in enumerate(statuses) for key in status):
            self.records()
        members = group_members()
        found = []
        for place, status in enumerate(statuses):
            for key, counts in status.items():
                if (place, key) in self._names:
                    name, description = self._names[place, key]
                    found.append(
                        {
                            "name": name,
                            "description": description,
                            "ranks": members.get(name, []),
                            "called": int(counts["last_enqueued_collective"]),
                            "done": int(counts["last_completed_collective"]),
                        }
                    )
        return found

    def records(self) -> list[dict[str, Any]]:
        """The latest calls, the oldest first."""
        from meshwright.torch_private import flight_records

        found = []
        for place, one in enumerate(flight_records(with_entries=True)):
            for entry in one.get("entries", []):
                self._names[place, str(entry["pg_id"])] = tuple(entry["process_group"])
                if not entry["is_p2p"]:
                    found.append(_record(entry))
        return sorted(found, key=lambda record: record["time"])[-MOST_RECORDS:]


class _Answers:
    """The thread that answers."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._pid = folder, rank, os.getpid()
        self._collectives = Collectives()
        self._answered = 0
        self._problem = ""

    def run(self) -> None:
        """Tell how far the rank has come, again and again, until nobody can read it."""
        while os.getpid() == self._pid:
            try:
                self._tell()
            except OSError:
                # Whoever watched has gone, and the folder with it.
                return
            time.sleep(PERIOD_S)

    def _tell(self) -> None:
        asked = _number_asked(self._folder)
        said: dict[str, Any] = {"pid": self._pid, "time": time.monotonic(), "answers": asked, "groups": []}
        records = []
        try:
            if asked != self._answered:
                records = self._collectives.records()
            said["groups"] = self._collectives.groups()
        except Exception as error:
            # Another release of torch may keep other records; a rank must train on all the same.
            if str(error) != self._problem:
                self._problem = str(error)
                print(f"meshwright: rank {self._rank} cannot tell of its collectives: {error!r}", file=sys.stderr)
        if asked != self._answered:
            _write(self._folder / f"{self._rank}.records", said | {"records": records})
            self._answered = asked
        _write(self._folder / f"{self._rank}.collectives", said)


def _number_asked(folder: Path) -> int:
    try:
        return int((folder / "ask").read_text())
    except (OSError, ValueError):
        return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _record(entry: dict[str, Any]) -> dict[str, Any]:
    """What matters of an entry of torch's recorder."""
    return {
        "group": entry["process_group"][0],
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"].split(":")[-1],
        "inputs": entry.get("input_sizes", []),
        "outputs": entry.get("output_sizes", []),
        "dtypes": entry.get("input_dtypes", []),
        # gloo never says "completed", NCCL does so before an entry is retired.
        "done": bool(entry["retired"]) or entry["state"] == "completed",
        "time": entry["time_created_ns"],
    }
