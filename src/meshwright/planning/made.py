"""A plan: what was asked, what is best, and what else would do. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.planning.question import Candidate, Found, Question
from meshwright.planning.runners import Runner
from meshwright.planning.whole_at_first import whole_at_first

if TYPE_CHECKING:
    from meshwright.planning.tryout import Tried


@dataclass(frozen=True)
class Plan:
    """All that `meshwright plan` says."""

    question: Question
    model: str
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    runners: tuple[Runner, ...]
    fewer: tuple[Candidate, ...]
    """Good strategies on fewer chips."""
    found: Found | None
    tokens: float | None = None
    """Of the whole training."""
    tried: tuple[Tried, ...] = ()
    """Candidates that were run here, in the order of their predicted times; the best is then the measured one."""
    narrower: Candidate | None = None
    """What would fit with narrower weights or moments, where nothing does without host memory."""

    @property
    def shown(self) -> Candidate:
        """The best; where nothing fits, what comes nearest."""
        found = self.best or (self.found.nearest if self.found is not None else None)
        assert found is not None
        return found

    def days(self, candidate: Candidate) -> float | None:
        """Days of training, with steps before compression begins, where the number of tokens is known."""
        if self.tokens is None:
            return None
        begun = whole_at_first(self.question, candidate)
        longer = 1.0 if begun is None else begun.mean_s / candidate.step_s
        per_second = candidate.tokens_per_s_per_gpu * candidate.scenario.cluster.gpus
        return self.tokens / per_second / 86_400 * longer

    def cost(self, candidate: Candidate) -> float | None:
        """Money for it, where the price of a chip's hour is known."""
        days, price = self.days(candidate), candidate.scenario.cluster.price
        return None if days is None or price is None else days * 24 * price * candidate.scenario.cluster.gpus

    def as_json(self) -> dict[str, Any]:
        """The stable form: docs/plan.md says what is in it."""
        from meshwright.planning.answer_json import plan_json

        return plan_json(self)
