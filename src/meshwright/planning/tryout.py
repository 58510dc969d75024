"""`meshwright plan --try K`: the best K candidates train for a few steps on this machine, and the fastest is chosen.

Each candidate is a process of its own (`trial.py`), which starts its ranks as a run does, trains the real model on
random text in a temporary folder, and is ended when its time is up. One that fails is told and passed over. No torch.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.data.prepare import prepare
from meshwright.errors import UserError
from meshwright.launch.limited import last_line, run_limited
from meshwright.planning.corrections import Learned, Observation, basis_of, corrected, subject_of
from meshwright.planning.emit import run_table
from meshwright.planning.made import Plan
from meshwright.planning.question import Candidate, estimate, in_full
from meshwright.planning.state_memory import GIB

STEPS = 6
"""Of each candidate, the first of which is not counted."""
LIMIT_S = 120.0
MOST_TEXT = 4 << 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tried:
    """A candidate, and what was measured of it."""

    candidate: Candidate
    step_s: float | None = None
    peak: float | None = None
    """Bytes of the fullest rank."""
    steps: int = 0
    failure: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The stable form: docs/plan.md says what is in it."""
        candidate = self.candidate
        return {
            "strategy": str(candidate.strategy),
            "micro_batch": candidate.micro_batch,
            "predicted": {
                "step_time_s": round(candidate.step_s, 6),
                "peak_gib": round(candidate.memory.peak / GIB, 3),
            },
            "measured": None
            if self.step_s is None
            else {
                "step_time_s": round(self.step_s, 6),
                "peak_gib": None if self.peak is None else round(self.peak / GIB, 3),
                "steps": self.steps,
            },
            "failure": self.failure,
        }


def try_out(plan: Plan, count: int, limit_s: float = LIMIT_S, say: Say = lambda line: None) -> Plan:
    """The same plan with the measured best of its best candidates first."""
    if count < 1:
        raise UserError(f"--try={count} must be a number of candidates from 1")
    if plan.best is None or plan.found is None:
        return plan
    question = plan.question
    question.spec.check_buildable()
    ranked = sorted(
        {
            (str(one.strategy), one.micro_batch): one for one in (*plan.candidates, *plan.found.ranked) if one.fits
        }.values(),
        key=lambda one: one.score("throughput"),
    )
    chosen = [in_full(replace(question, cluster=one.scenario.cluster), one) for one in ranked[:count]]
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-try-") as folder:
        _make_data(Path(folder), question.sequence_length, question.global_batch)
        for number, candidate in enumerate(chosen, 1):
            say(f"trying {number} of {len(chosen)}: {candidate.strategy}, micro-batch {candidate.micro_batch}")
            tried.append(_run(plan, candidate, Path(folder), number, limit_s))
            say(f"  {told(tried[-1])}")
    ran = [one for one in tried if one.step_s is not None]
    if not ran:
        reasons = "; ".join(f"{one.candidate.strategy}: {one.failure}" for one in tried)
        raise UserError(f"--try: none of {len(tried)} candidates ran: {reasons}")
    best = _as_measured(plan, min(ran, key=lambda one: one.step_s or 0.0))
    others = [one for one in plan.candidates if not one.same_choice(best)]
    return replace(plan, best=best, candidates=(best, *others), tried=tuple(tried))


def _as_measured(plan: Plan, tried: Tried) -> Candidate:
    """A candidate with the figures that were measured; too short a run to be remembered for other plans."""
    assert tried.step_s is not None
    candidate = tried.candidate
    scenario = candidate.scenario
    question = replace(plan.question, cluster=scenario.cluster)
    plain = estimate(question, candidate.strategy, candidate.micro_batch)
    seen = Observation(
        subject_of(scenario),
        str(candidate.strategy),
        candidate.micro_batch,
        basis_of(scenario.cluster),
        plain.step_s,
        tried.step_s,
        plain.memory.peak,
        tried.peak or plain.memory.peak,
    )
    return corrected(plain, Learned((seen,)))


def told(tried: Tried) -> str:
    """One candidate's result in words."""
    if tried.step_s is None:
        return f"failed: {tried.failure}"
    peak = "" if tried.peak is None else f", {tried.peak / GIB:.2f} GiB"
    return f"{tried.step_s:.3f} s a step ({tried.candidate.step_s:.3f} predicted){peak}"


def _make_data(folder: Path, length: int, batch: int) -> None:
    """A corpus of random text, of one step if that is not too much: longer runs read it again."""
    draw = random.Random(0)
    size = min(MOST_TEXT, (length + 1) * batch * 2)
    size = max(size, 4 * (length + 1))
    words = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=1 << 16))
    (folder / "text.txt").write_text((words * (size // len(words) + 1))[:size], encoding="utf-8")
    prepare([folder / "text.txt"], folder / "data", "bytes", workers=1)


def _run(plan: Plan, candidate: Candidate, folder: Path, number: int, limit_s: float) -> Tried:
    table = run_table(replace(plan, best=candidate), str(folder / "data"))
    on_cpu = candidate.scenario.cluster.chip.key == "cpu"
    table["run"] = {"dir": str(folder / f"run-{number}"), "device": "cpu" if on_cpu else "cuda"}
    table["data"] |= {"validation": 0.0}
    table["train"] |= {"steps": STEPS, "eval_sequences": 0}
    results = folder / f"results-{number}"
    results.mkdir()
    ranks = candidate.strategy.world
    asked = {"config": table, "ranks": ranks, "results": str(results), "timeout_s": limit_s}
    (results / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    failure = _process(results / "asked.json", ranks, limit_s)
    found = [_result(results / f"rank-{rank}.json") for rank in range(ranks)]
    steps = min((len(one["steps"]) for one in found), default=0)
    # The first step makes what the others use again.
    if steps < 2:
        return Tried(candidate, failure=failure or "it ended without a second step")
    slowest = max(median(one["steps"][1:]) for one in found)
    if failure is not None and "in time" not in failure:
        return Tried(candidate, failure=failure)
    return Tried(candidate, slowest, max(float(one["peak"]) for one in found), steps - 1)


def _result(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"steps": [], "peak": 0.0}
    return found


def _process(asked: Path, ranks: int, limit_s: float) -> str | None:
    """Run a trial to its end or to its limit; gives what went wrong."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    errors = asked.with_name("stderr")
    code = run_limited([sys.executable, "-m", "meshwright.planning.trial", str(asked)], errors, limit_s, environment)
    if code == 0:
        return None
    if code is None:
        return f"it was not done in time ({limit_s:g} s; --try-limit changes that)"
    return _last_words(errors, code)


def _last_words(errors: Path, code: int) -> str:
    """The line that says what went wrong, of all that was said."""
    lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line.strip() for line in lines if line.strip().startswith("trial: ")]
    if telling:
        return telling[-1].removeprefix("trial: ")
    said = last_line(errors)
    return f"exit code {code}" + (f": {said}" if said else "")
