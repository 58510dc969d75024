"""How often a run is started again: not for ever, and not at all when it makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.elastic.failure import Failure, RankError
from meshwright.errors import ExitCode


class NoProgressError(RankError):
    """The same step failed again and again."""

    exit_code = ExitCode.NO_PROGRESS


@dataclass(frozen=True)
class Budget:
    """What elastic.max_restarts and elastic.same_step_failures allow."""

    max_restarts: int
    same_step_failures: int = 3

    def refusal(self, failures: Sequence[Failure]) -> RankError | None:
        """Why a run with these failures is not started again; None when it is."""
        if not failures or self.max_restarts == 0:
            return RankError(failures[-1].text) if failures else None
        last = failures[-1]
        if last.remedied:
            return None
        row = 0
        for failure in reversed(failures):
            # A machine that was lost is not the step's fault.
            if failure.step != last.step or failure.rank < 0 or failure.remedied:
                break
            row += 1
        if row >= self.same_step_failures:
            return NoProgressError(
                f"no progress: step {last.step} failed {row} times in a row, which elastic.same_step_failures="
                f"{self.same_step_failures} does not allow; last, {last.title}\n{last.text}"
            )
        if len(failures) > self.max_restarts:
            return RankError(
                f"the ranks failed {len(failures)} times, which elastic.max_restarts={self.max_restarts} does not "
                f"allow; last, {last.title}\n{last.text}"
            )
        return None
