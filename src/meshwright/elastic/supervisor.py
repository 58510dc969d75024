"""Looks after the ranks of one machine: passes signals on, ends all of them as soon as one fails, starts them again.

A generation is one start of all ranks. It ends as a whole: the ranks have finished, were asked to stop and have saved,
or have failed, in which case the first cause is shown and the next generation goes on from the newest checkpoint. Who
takes part in a generation is the membership's to say: this machine alone, or several that meet.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.elastic.failure import Failure, RankError
from meshwright.elastic.journal import Journal
from meshwright.elastic.membership import Membership
from meshwright.elastic.placement import Placement
from meshwright.elastic.ranks import Ending, Ranks, Work
from meshwright.elastic.watch_link import WatchLink
from meshwright.errors import ExitCode, UserError
from meshwright.lock import Fence, Lock, is_alive
from meshwright.training.hooks import RESIZE_SIGNAL, RETUNED, STOP_SIGNALS, is_echo, show_cursor
from meshwright.training.run_folder import RunFolder

MOST_WATCHDOGS = 20
"""How often a watchdog that has ended is started again."""
POLL_S = 0.25
OWNER = "owner"
"""File with the process id of the supervisor whose private folder it is."""


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
        self._asked_at = 0.0
        self._ranks: Ranks | None = None
        self._watchdog: WatchLink | None = None
        self._lock: Lock | None = None
        self._private = Path()
        self._journal = Journal(folder, membership)

    def run(self) -> Ending:
        """How the run ended; raises the first cause when it failed for good."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as private, self._signals():
            self._private = Path(private)
            (self._private / OWNER).write_text(str(os.getpid()))
            _sweep(self._private.parent)
            given_up: str | None = None
            try:
                if self._watchdog_command is not None:
                    self._watchdog = WatchLink(self._watchdog_command, self._private)
                    self.membership.watch(self._private)
                return self._generations()
            except (RankError, UserError) as error:
                given_up = str(error)
                raise
            finally:
                if self._ranks is not None:
                    self._ranks.kill()
                self._journal.record_failure()
                if given_up is not None:
                    self._journal.give_up(given_up)
                self._journal.take_news()
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
                self._journal.tell(failure)
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
            self._journal.note_progress(self._ranks, ended=True)
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
            self._journal.note_progress(ranks)
            self._journal.take_news()
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
                self._journal.say("the watchdog ends again and again: a rank that hangs will not be noticed")
                self._watchdog = None
                return None
            self._journal.say("the watchdog has ended and is started again")
            self._watchdog.restart()
        for verdict in self._watchdog.verdicts():
            if verdict.generation not in (None, ranks.placement.generation):
                continue  # Said of ranks that were ended meanwhile.
            self._journal.event(verdict.kind, ranks=verdict.ranks, text=verdict.text, report=verdict.report)
            if verdict.kind == "drain":
                os.kill(os.getpid(), signal.SIGTERM)
            if verdict.kind == "hang":
                guilty = verdict.ranks[0] if verdict.ranks else -1
                where = f"\nthe whole report is in {verdict.report}" if verdict.report else ""
                failure = ranks.blame(guilty, "hangs", verdict.text + where, **verdict.elsewhere)
                ranks.kill()
                return failure
            self._journal.say(verdict.text)
        return None

    def _hold(self, placement: Placement) -> Placement:
        """Let the run folder belong to this generation, where that is this machine's to do."""
        if self.folder is None or placement.node != 0:
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            self._journal.holds = False
            self._journal.record_failure()
            self._journal.take_news()
            return placement
        fence = Fence(self.membership.launch, placement.generation, placement.host)
        if self._lock is not None and self._lock.is_current:
            self._lock.write(fence)
        else:
            self._lock = self.folder.hold(self._fresh and placement.generation == 0, fence)
        self._journal.holds = True
        self._journal.record_failure()
        self._journal.take_news()
        return replace(placement, fence=fence)

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
            if is_echo(number, self._asked_at):
                return
            if self._ranks is not None:
                self._ranks.send(signal.SIGKILL)
            if self._watchdog is not None:
                self._watchdog.close()
            show_cursor()
            shutil.rmtree(self._private, ignore_errors=True)
            os._exit(128 + number)
        self._asked, self._asked_at = signal.Signals(number), time.monotonic()
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
