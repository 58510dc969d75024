"""What a supervisor tells of a run: on the console, and in the run folder's events where its machine holds the folder.

What machines have to say that do not hold it comes through the membership and is written by the one that does.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from meshwright.elastic.failure import Failure
from meshwright.elastic.membership import Membership
from meshwright.elastic.ranks import Ranks
from meshwright.pulse import PHASES
from meshwright.training.hooks import show_cursor
from meshwright.training.run_folder import RunFolder

TOLD_TO_ALL = ("quarantined",)
"""Kinds of news that the consoles of all machines show; the others' own console has shown."""

AFTER_THE_STEP = PHASES[PHASES.index("evaluate") :]
"""Phases of a step whose update is made."""


class Journal:
    """The words of one supervisor."""

    def __init__(self, folder: RunFolder | None, membership: Membership) -> None:
        self._folder, self._membership = folder, membership
        self.holds = False
        """Whether this machine holds the run folder now."""
        self._noticed: tuple[float, Failure] | None = None
        self._untold: Failure | None = None
        self._failed = False
        """Whether a failure was written here."""

    def say(self, text: str) -> None:
        """A line on the console."""
        with suppress(OSError, ValueError):
            print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def event(self, kind: str, **facts: Any) -> None:
        """A line in the run folder's events, by whichever machine holds it."""
        if self._folder is None:
            return
        if not self.holds:
            self._membership.post(kind, facts)
            return
        self._folder.event(kind, **facts)

    def take_news(self) -> None:
        """Write what other machines have to tell, where that is this one's to do."""
        for news in self._membership.news():
            kind = str(news.pop("kind"))
            if kind in TOLD_TO_ALL:
                self.say(str(news["text"]))
            if self.holds:
                self.event(kind, **news)

    def tell(self, failure: Failure) -> None:
        """Say what happened, on the console and in the run folder."""
        self._noticed = (time.monotonic(), failure)
        if self._folder is None:
            return
        if failure.code is None:
            # Below a progress bar that nobody took away.
            show_cursor()
            self.say(f"{failure.title}\n{failure.text.rstrip()}")
        # Written by who holds the folder next: that may be another machine than before.
        self._untold = failure

    def record_failure(self) -> None:
        """Write what went wrong to the run folder, where this machine holds it."""
        failure, self._untold = self._untold, None
        if failure is None or not self.holds:
            return
        self._failed = True
        self.event(
            "failed",
            rank=failure.rank,
            host=failure.host,
            cause=failure.cause,
            step=failure.step,
            phase=failure.phase,
            generation=failure.generation,
            detect_s=failure.detect_s,
        )

    def give_up(self, text: str) -> None:
        """Write that nothing follows on what went wrong."""
        if self.holds and self._failed:
            self.event("gave_up", text=text.strip().splitlines()[0] if text.strip() else "")

    def note_progress(self, ranks: Ranks, ended: bool = False) -> None:
        """After a restart: note when the first new step is done."""
        if self._noticed is None or self._folder is None or not ranks.placement.local:
            return
        noticed, failure = self._noticed
        resumed = self._resumed()
        if resumed is None:
            return
        new = any(
            beat.step > resumed + 1 or (beat.step > resumed and beat.phase == "hooks")
            for beat in ranks.beats().values()
        )
        if not new and not ended:
            return
        self._noticed = None
        done = failure.step if failure.phase in AFTER_THE_STEP else failure.step - 1
        facts = {
            "generation": ranks.placement.generation,
            "step": resumed,
            "ranks": ranks.placement.world,
            "restart_s": round(time.monotonic() - noticed, 3),
            "steps_lost": max(0, done - resumed),
        }
        if self.holds:
            self.event("restarted", **facts)
        self.say(
            f"restarted from step {resumed} as generation {facts['generation']} on {facts['ranks']} ranks in "
            f"{facts['restart_s']:.1f} s; {facts['steps_lost']} steps were done again"
        )

    def _resumed(self) -> int | None:
        """The step from which this generation goes on; None before it says so."""
        assert self._folder is not None
        for event in reversed(self._folder.read_events()):
            if event["event"] == "failed":
                return None
            if event["event"] in ("started", "resumed"):
                return int(event["step"])
        return None
