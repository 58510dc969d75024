"""What the driver of a run on Ray and its ranks tell each other: an actor of its own, which outlives the ranks.

Ray Train starts workers again after whatever error one of them has. So a rank that knows why starting again would not
help says so here and ends without an error, and the others follow. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import ExitCode


class Desk:
    """One for a run; a group is the ranks of one start, by the address where they meet."""

    def __init__(self, same_step_failures: int) -> None:
        self._same_step_failures = same_step_failures
        self._wish: str | None = None
        self._verdict: tuple[int, str] | None = None
        self._group = ""
        self._plan: Any = None
        self._reports = 0
        self._over = False
        self._told = 0
        self._told_before: int | None = None
        self._reached: list[int] = []
        """The last step that was recorded before each start."""

    def stop(self, reason: str) -> None:
        """Ask the run to save and end."""
        self._wish = self._wish or reason

    def wish(self) -> str | None:
        """Why it is to end; None while it is not."""
        return self._wish

    def give_up(self, code: int, text: str) -> None:
        """Say why starting again would not help; the first word counts."""
        self._verdict = self._verdict or (code, text)

    def verdict(self) -> tuple[int, str] | None:
        """The exit code and the reason, once somebody has given up."""
        return self._verdict

    def begin(self, group: str, reached: int) -> None:
        """The first rank of a new group is there; `reached` is the last step that the run has recorded."""
        self._group, self._plan, self._reports, self._over = group, None, 0, False
        self._told_before = self._told if self._reached else None
        self._reached.append(reached)
        failures = self._reached[1:]
        row = failures[-self._same_step_failures :]
        if len(row) == self._same_step_failures and len(set(row)) == 1:
            self.give_up(
                ExitCode.NO_PROGRESS,
                f"no progress: step {reached + 1} failed {len(row)} times in a row, which elastic.same_step_failures="
                f"{self._same_step_failures} does not allow",
            )

    def starts(self) -> int:
        """How often the ranks were started."""
        return len(self._reached)

    def settle(self, group: str, plan: Sequence[Any]) -> None:
        """The first rank has planned for the ranks that there are."""
        if group == self._group:
            self._plan = plan

    def plan(self, group: str) -> Sequence[Any] | None:
        """What the first rank of this group has planned."""
        return self._plan if group == self._group else None

    def announce(self, group: str) -> None:
        """The first rank is about to report to Ray, in which every worker must take part."""
        if group == self._group:
            self._reports += 1

    def tell(self, step: int) -> None:
        """Ray has the metrics of a logged step."""
        self._told = step

    def told_before(self) -> int | None:
        """The last logged step that Ray had when this group began; None for the first group, which owes nothing."""
        return self._told_before

    def leave(self, group: str) -> None:
        """The first rank has made its last report."""
        if group == self._group:
            self._over = True

    def reports(self, group: str) -> tuple[int, bool]:
        """How many reports were announced, and whether they are all."""
        return (self._reports, self._over) if group == self._group else (0, False)
