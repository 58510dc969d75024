"""What a rank does for those who watch it: it answers when asked where it stands.

- A signal makes it write the Python stacks of all its threads to `<rank>.stacks`, also while it holds the GIL.
- A fatal signal (an abort inside a library, a segmentation fault) leaves the stacks in `<rank>.fatal`.
- A small thread writes to `<rank>.collectives` how far it has come in each process group, twice a second, and when a
  file `ask` has a new number also which collectives it has called lately. The age of what it wrote tells whether the
  rank still lets its threads run.

`Pulse` says which phase a rank is in; this is for the questions that a stuck rank raises.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
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
    thread = threading.Thread(target=_tell, args=(folder, rank, os.getpid()), name=ANSWERING, daemon=True)
    thread.start()


def leave_last_words(folder: Path, rank: int) -> None:
    """Write down which collectives this rank has called lately: for a rank that fails, before it ends."""
    from meshwright.torch_private import flight_records

    entries = [entry for one in flight_records(with_entries=True) for entry in one.get("entries", [])]
    with suppress(OSError):
        _write(folder / f"{rank}.last", {"records": [_record(entry) for entry in entries if not entry["is_p2p"]][-20:]})


def _tell(folder: Path, rank: int, pid: int) -> None:
    from meshwright.torch_private import flight_records, group_members

    names: dict[tuple[int, str], tuple[str, str]] = {}
    asked = 0
    target = folder / f"{rank}.collectives"
    while os.getpid() == pid:
        records: list[dict[str, Any]] = []
        number = _number_asked(folder)
        found = flight_records(with_entries=False)
        unknown = any((place, key) not in names for place, one in enumerate(found) for key in one.get("pg_status", {}))
        if number != asked or unknown:
            found = flight_records(with_entries=True)
            for place, one in enumerate(found):
                for entry in one.get("entries", []):
                    names[place, str(entry["pg_id"])] = tuple(entry["process_group"])
            if number != asked:
                records = [_record(entry) for one in found for entry in one.get("entries", []) if not entry["is_p2p"]]
                records = sorted(records, key=lambda record: record["time"])[-MOST_RECORDS:]
        members = group_members()
        groups = []
        for place, one in enumerate(found):
            for key, status in one.get("pg_status", {}).items():
                if (place, key) not in names:
                    continue
                name, description = names[place, key]
                groups.append(
                    {
                        "name": name,
                        "description": description,
                        "ranks": members.get(name, []),
                        "called": int(status["last_enqueued_collective"]),
                        "done": int(status["last_completed_collective"]),
                    }
                )
        said: dict[str, Any] = {"pid": pid, "time": time.monotonic(), "answers": asked, "groups": groups}
        if number != asked:
            asked = number
            said |= {"answers": asked, "records": records}
            with suppress(OSError):
                _write(folder / f"{rank}.records", said)
        try:
            _write(target, {key: value for key, value in said.items() if key != "records"})
        except OSError:
            # Whoever watched has gone, and the folder with it.
            return
        time.sleep(PERIOD_S)


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
