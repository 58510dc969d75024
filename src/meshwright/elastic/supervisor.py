"""Looks after the ranks of one machine: passes signals on, ends all of them as soon as one fails, starts them again.

A generation is one start of all ranks. It ends as a whole: the ranks have finished, were asked to stop and have saved,
or have failed, in which case the first cause is shown and the next generation goes on from the newest checkpoint. Who
takes part in a generation is the membership's to say: this machine alone, or several that meet.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure, RankError
from meshwright.elastic.placement import Placement
from meshwright.elastic.ranks import Ending, Ranks, Work
from meshwright.elastic.watch_link import WatchLink
from meshwright.errors import ExitCode, UserError
from meshwright.lock import Fence, Lock, is_alive
from meshwright.training.hooks import RESIZE_SIGNAL, RETUNED, STOP_SIGNALS, show_cursor
from meshwright.training.run_folder import RunFolder

MOST_WATCHDOGS = 20
"""How often a watchdog that has ended is started again."""
POLL_S = 0.25
OWNER = "owner"
"""File with the process id of the supervisor whose private folder it is."""


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

    def finish(self, code: int, text: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class Supervisor:
    """Runs generation after generation until the run is over."""

    def __init__(
        self,
        work_of: Callable[[Placement], Work],
        membership: Membership,
        *,
        device: str,
        timeout_s: float,
        folder: RunFolder | None = None,
        fresh: bool = False,
        watchdog: Sequence[str] | None = None,
    ) -> None:
        """`work_of` gives what the ranks of a generation do; `watchdog` the command that watches them."""
        self.membership = membership
        self.folder = folder
        self._work_of, self._device, self._timeout_s = work_of, device, timeout_s
        self._fresh, self._watchdog_command = fresh, watchdog
        self._asked: signal.Signals | None = None
        self._ranks: Ranks | None = None
        self._watchdog: WatchLink | None = None
        self._lock: Lock | None = None
        self._private = Path()
        self._noticed: tuple[float, Failure] | None = None
        self._untold: Failure | None = None

    def run(self) -> Ending:
        """How the run ended; raises the first cause when it failed for good."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as private, self._signals():
            self._private = Path(private)
            (self._private / OWNER).write_text(str(os.getpid()))
            _sweep(self._private.parent)
            try:
                if self._watchdog_command is not None:
                    self._watchdog = WatchLink(self._watchdog_command, self._private)
                return self._generations()
            finally:
                if self._ranks is not None:
                    self._ranks.kill()
                self._record_failure()
                if self._watchdog is not None:
                    self._watchdog.close()
                self.membership.close()
                if self._lock is not None:
                    self._lock.close()

    def _generations(self) -> Ending:
        failure: Failure | None = None
        while True:
            placement = None if self._was_asked() else self.membership.join(failure, self._was_asked)
            if placement is None:
                self.membership.leave()
                return Ending(ExitCode.PREEMPTED, "asked to stop between two generations")
            # All ranks must check or none; other machines do not know of this one's failure.
            check = failure is not None and failure.check and placement.local == placement.world
            try:
                failure = self._generation(replace(self._hold(placement), check=check))
            except UserError as mistake:
                self.membership.finish(mistake.exit_code, str(mistake))
                raise
            if failure is not None:
                self._tell(failure)
                if failure.code is not None:
                    self.membership.finish(failure.code, failure.text)
                    error = UserError(failure.text)
                    error.exit_code = failure.code
                    raise error
                if self._was_asked():
                    self.membership.leave()
                    raise RankError(failure.text)
                continue
            assert self._ranks is not None
            over = self.membership.over()
            if not placement.local and over is None:
                continue
            ending = over or self._ranks.ending()
            self._note_progress(self._ranks, ended=True)
            if ending.code == ExitCode.DONE:
                self.membership.finish(ending.code, "")
                return ending
            if ending.reason == RETUNED and not self._was_asked():
                continue
            stopped = {number.name for number in STOP_SIGNALS}
            if self._was_asked() or self.membership.alone or ending.reason in stopped:
                self.membership.leave()
                return ending

    def _generation(self, placement: Placement) -> Failure | None:
        """Start the ranks of a generation and see them to their end; what went wrong, if anything did."""
        ranks = Ranks(
            self._work_of(placement), placement, self._private, device=self._device, timeout_s=self._timeout_s
        )
        # A signal that comes while they are started is held back until it can reach them all.
        with _blocked(STOP_SIGNALS):
            ranks.start(str(self.folder.path.resolve()) if self.folder is not None else None)
            self._ranks = ranks
        resizing = False
        while ranks.running or (not placement.local and self.membership.over() is None):
            ranks.wait([*self.membership.readable(), *([self._watchdog] if self._watching else [])], POLL_S)
            if ranks.failed or ranks.stopped_early:
                break
            if (hang := self._hang(ranks)) is not None:
                return self.membership.explain(hang)
            change = self.membership.changes()
            if isinstance(change, Failure):
                ranks.kill()
                return self.membership.explain(ranks.date(change))
            if change and not resizing:
                resizing = True
                ranks.send(RESIZE_SIGNAL)
                if not placement.local:
                    return None
            self._note_progress(ranks)
        if not ranks.failed and not ranks.running:
            return None
        ranks.settle()
        return None if ranks.stopped_early else self.membership.explain(ranks.failure())

    def _was_asked(self) -> bool:
        return self._asked is not None

    @property
    def _watching(self) -> bool:
        return self._watchdog is not None and self._watchdog.alive

    def _hang(self, ranks: Ranks) -> Failure | None:
        """What the watchdog says, if it is that ranks hang; these are ended."""
        if self._watchdog is None:
            return None
        if not self._watchdog.alive:
            if self._watchdog.restarts >= MOST_WATCHDOGS:
                self._say("the watchdog ends again and again: a rank that hangs will not be noticed")
                self._watchdog = None
                return None
            self._say("the watchdog has ended and is started again")
            self._watchdog.restart()
        for verdict in self._watchdog.verdicts():
            if verdict.generation not in (None, ranks.placement.generation):
                continue  # Said of ranks that were ended meanwhile.
            self._event(verdict.kind, ranks=verdict.ranks, text=verdict.text, report=verdict.report)
            if verdict.kind == "drain":
                os.kill(os.getpid(), signal.SIGTERM)
            if verdict.kind == "hang":
                guilty = verdict.ranks[0] if verdict.ranks else -1
                where = f"\nthe whole report is in {verdict.report}" if verdict.report else ""
                failure = ranks.blame(guilty, "hangs", verdict.text + where)
                ranks.kill()
                return failure
            self._say(verdict.text)
        return None

    def _hold(self, placement: Placement) -> Placement:
        """Let the run folder belong to this generation, where that is this machine's to do."""
        if self.folder is None or placement.node != 0:
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            self._untold = None
            return placement
        fence = Fence(self.membership.launch, placement.generation, placement.host)
        if self._lock is not None and self._lock.is_current:
            self._lock.write(fence)
        else:
            self._lock = self.folder.hold(self._fresh and placement.generation == 0, fence)
        self._record_failure()
        return replace(placement, fence=fence)

    def _tell(self, failure: Failure) -> None:
        """Say what happened, on the console and in the run folder."""
        self._noticed = (time.monotonic(), failure)
        if self.folder is None:
            return
        if failure.code is None:
            # Below a progress bar that nobody took away.
            show_cursor()
            self._say(f"{failure.title}\n{failure.text.rstrip()}")
        # Written by who holds the folder next: that may be another machine than before.
        self._untold = failure

    def _record_failure(self) -> None:
        """Write what went wrong to the run folder, where this machine holds it."""
        failure, self._untold = self._untold, None
        if failure is None:
            return
        self._event(
            "failed",
            rank=failure.rank,
            host=failure.host,
            cause=failure.cause,
            step=failure.step,
            phase=failure.phase,
            generation=failure.generation,
            detect_s=failure.detect_s,
        )

    def _note_progress(self, ranks: Ranks, ended: bool = False) -> None:
        """After a restart: note when the first new step is done."""
        if self._noticed is None or self.folder is None or not ranks.placement.local:
            return
        noticed, failure = self._noticed
        resumed = self._resumed(ranks)
        if resumed is None:
            return
        new = any(
            beat.step > resumed + 1 or (beat.step > resumed and beat.phase == "hooks")
            for beat in ranks.beats().values()
        )
        if not new and not ended:
            return
        self._noticed = None
        done = failure.step if failure.phase in ("hooks", "end") else failure.step - 1
        facts = {
            "generation": ranks.placement.generation,
            "step": resumed,
            "ranks": ranks.placement.world,
            "restart_s": round(time.monotonic() - noticed, 3),
            "steps_lost": max(0, done - resumed),
        }
        self._event("restarted", **facts)
        self._say(
            f"restarted from step {resumed} as generation {facts['generation']} on {facts['ranks']} ranks in "
            f"{facts['restart_s']:.1f} s; {facts['steps_lost']} steps were done again"
        )

    def _resumed(self, ranks: Ranks) -> int | None:
        """The step from which this generation goes on; None before it says so."""
        assert self.folder is not None
        with suppress(OSError, ValueError):
            for line in reversed(self.folder.events.read_text().splitlines()):
                event = json.loads(line)
                if event["event"] == "failed":
                    return None
                if event["event"] in ("started", "resumed"):
                    return int(event["step"])
        return None

    def _event(self, kind: str, **facts: Any) -> None:
        """A line in the run folder's events, by the machine that holds it."""
        if self.folder is not None and self._lock is not None:
            # A full disk must not keep a run from being looked after.
            with suppress(OSError):
                self.folder.event(kind, **facts)

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"meshwright: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        previous: dict[signal.Signals, Any] = {}
        with suppress(ValueError):  # Only a main thread may; a caller in another thread passes no signals on.
            previous = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
            previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            if self._ranks is not None:
                self._ranks.send(signal.SIGKILL)
            if self._watchdog is not None:
                self._watchdog.close()
            show_cursor()
            shutil.rmtree(self._private, ignore_errors=True)
            os._exit(128 + number)
        self._asked = signal.Signals(number)
        if self._ranks is not None:
            self._ranks.send(number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the ranks, which the terminal does not reach, stop and go on with the parent."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._ranks is not None:
            self._ranks.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._ranks is not None:
            self._ranks.send(signal.SIGCONT)
        if self._watchdog is not None:
            self._watchdog.restart()


@contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sweep(place: Path) -> None:
    """Take away what supervisors that were killed have left: nobody else could."""
    for owner in place.glob(f"meshwright-*/{OWNER}"):
        with suppress(OSError, ValueError):
            if owner.stat().st_uid == os.getuid() and not is_alive(int(owner.read_text())):
                shutil.rmtree(owner.parent)
