"""Who takes part in a generation of ranks: this machine alone, or several that meet (`member.Member`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure
from meshwright.elastic.placement import Placement
from meshwright.elastic.ranks import Ending


class Membership(Protocol):
    """Who takes part in a generation."""

    launch: str
    """A name of this launch that no other has."""
    alone: bool
    """Whether there are no other machines that would go on."""

    def join(self, failure: Failure | None, cancelled: Callable[[], bool]) -> Placement | None:
        """The next generation, once everyone is there; None when cancelled before, raises what ends the run instead."""

    def explain(self, failure: Failure) -> Failure:
        """The cause that a failure seen here follows from, if another machine knows it."""

    def changes(self) -> Failure | bool:
        """True when machines come or go in peace, a Failure when one is lost, else False."""

    def readable(self) -> list[Any]:
        """What to wait for besides the ranks."""

    def over(self) -> Ending | None:
        """How the run ended, if it did so while no ranks of this machine took part."""

    def watch(self, folder: Path) -> None:
        """Carry what watchdogs tell each other from and to a folder."""

    def post(self, kind: str, facts: dict[str, Any]) -> None:
        """Something for the run's events, to be written by the machine that holds the run folder."""

    def news(self) -> list[dict[str, Any]]:
        """What machines have posted since the last time, each with its `kind`."""

    def finish(self, code: int, text: str) -> None:
        """The run is over for everyone."""

    def leave(self) -> None:
        """This machine takes no further part; the others go on."""

    def close(self) -> None:
        """Always, at the very end."""


class Alone:
    """One machine: its ranks are all there is."""

    alone = True

    def __init__(self, count: int, budget: Budget) -> None:
        self.launch = os.urandom(8).hex()
        self._count, self._budget = count, budget
        self._failures: list[Failure] = []
        self._generation = -1

    def join(self, failure: Failure | None, cancelled: Callable[[], bool]) -> Placement | None:
        if failure is not None:
            self._failures.append(failure)
            if (refusal := self._budget.refusal(self._failures)) is not None:
                raise refusal
        self._generation += 1
        return Placement(self._count, self._count, generation=self._generation)

    def explain(self, failure: Failure) -> Failure:
        return failure

    def changes(self) -> Failure | bool:
        return False

    def readable(self) -> list[Any]:
        return []

    def over(self) -> Ending | None:
        return None

    def watch(self, folder: Path) -> None:
        pass

    def post(self, kind: str, facts: dict[str, Any]) -> None:
        pass

    def news(self) -> list[dict[str, Any]]:
        return []

    def finish(self, code: int, text: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
