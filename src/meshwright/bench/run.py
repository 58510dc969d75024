"""Starts a process for every contender, micro-batch and repeat, in turns, and collects what they found. No torch.

A process of its own gives each a clean memory, and its start is measured with it. The first of a contender compiles
into an empty folder, later ones find what it has compiled. Turns go over all contenders before the next repeat, so that
what else happens on the machine meets all of them alike.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.bench.contenders import Contender
from meshwright.bench.trial import Found, Trial
from meshwright.launch.limited import last_line, run_limited

Say = Callable[[str], None]


class Entry(NamedTuple):
    """A contender and its trials, one for each micro-batch."""

    contender: Contender
    trials: Sequence[Trial]


def run_all(entries: Sequence[Entry], repeats: int, limit_s: float, say: Say) -> list[Found]:
    """Everything that was found: each contender at each micro-batch, so many times."""
    found: list[Found] = []
    given_up: dict[tuple[str, int], str] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        for repeat in range(repeats):
            for turn in zip(*(entry.trials for entry in entries), strict=True):
                for (contender, _), trial in zip(entries, turn, strict=True):
                    key = contender.name, trial.micro_batch
                    if key in given_up:
                        continue
                    say(f"{contender.name}, micro-batch {trial.micro_batch}, {repeat + 1} of {repeats} ...")
                    one = _one(contender, replace(trial, contender=contender.name), Path(folder), limit_s)
                    found.append(replace(one, warm=repeat > 0))
                    if reason := one.refusal or one.failure:
                        given_up[key] = reason
                    say(f"  {_told(one)}")
    return found


def run_module(module: str, asked: object, limit_s: float, folder: Path, environment: dict[str, str]) -> Any:
    """What a module of this package, run as a program, leaves in its file; where it leaves nothing, why."""
    asked_file, found_file, errors = (folder / name for name in ("asked.json", "found.json", "stderr"))
    found_file.unlink(missing_ok=True)
    asked_file.write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, "-m", f"meshwright.bench.{module}", str(asked_file), str(found_file)]
    code = run_limited(command, errors, limit_s, {**os.environ, **environment})
    if code is None:
        return f"it was not done in time ({limit_s:g} s; --limit changes that)"
    if found_file.exists():
        return dict(json.loads(found_file.read_text(encoding="utf-8")))
    said = last_line(errors)
    return f"exit code {code}" + (f": {said}" if said else "")


def _one(contender: Contender, trial: Trial, folder: Path, limit_s: float) -> Found:
    place = folder / f"{contender.name}-{trial.micro_batch}"
    place.mkdir(exist_ok=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": str(place / "triton")}
    # System-wide, so that a process can tell how long it has been on its way.
    asked = {"trial": trial.as_json(), "started": time.monotonic()}
    given = run_module("worker", asked, limit_s, place, caches | dict(contender.environment))
    if isinstance(given, str):
        return Found(contender.name, trial.micro_batch, failure=given)
    return Found.from_json(given)


def _told(one: Found) -> str:
    if one.refusal or one.failure:
        return f"{'cannot' if one.refusal else 'failed'}: {one.refusal or one.failure}"
    middle = sorted(one.step_ms)[len(one.step_ms) // 2]
    return f"{middle:.1f} ms a step, first step after {one.first_step_s:.1f} s"
