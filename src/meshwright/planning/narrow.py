"""What would fit if weights or moments were kept in less than float32, where nothing does without host memory."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import UserError
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.planning.question import Candidate, Question, in_full
from meshwright.planning.search import search

CHOICES = (Kept("float32", "int8"), Kept("bf16", "int8"))
"""The wider one first."""


def narrower(question: Question, best: Candidate | None) -> Candidate | None:
    """The best that fits with the widest of the choices; None where it need not be narrower, or that does not help."""
    needed = best is None or best.strategy.offload != "none"
    if not needed or question.kept != FLOAT32 or question.cluster.groups or question.software != "meshwright":
        return None
    for kept in CHOICES:
        asked = replace(question, kept=kept)
        try:
            found = search(asked).best
        except UserError:
            return None  # Whoever asked cannot use what is kept so.
        if found is not None and found.strategy.offload == "none":
            shown = in_full(asked, found)
            if shown.fits and (best is None or shown.step_s < best.step_s):
                return shown
    return None


def in_words(found: Candidate, best: Candidate | None) -> str:
    """The advice."""
    faster = f", {best.step_s / found.step_s:.1f} times as fast" if best is not None else ""
    return (
        f"with {found.scenario.kept}, {found.strategy} with micro-batch {found.micro_batch} fits in "
        f"{found.memory.peak / 2**30:.1f} GiB at {found.step_s:.3g} s a step{faster}"
    )
