"""The watchdog: a process beside the ranks of one machine that tells when one of them holds up the others.

    python -m meshwright.elastic.watchdog FOLDER ...

The folder holds a pulse file of each rank, `ranks.json` with the numbers of their processes, and what ranks tell of
themselves (`rank_side`). The watchdog writes lines of JSON to its standard output, each with `kind`, `ranks`, `text`
and `report`:

- `warning`: a rank is stopped, or over its limit and still moving. Nothing needs to be done.
- `cleared`: it goes on.
- `hang`: the ranks named will not come along by themselves; the report, in the run folder, says all that is known.
- `health`, `health_cleared`: a sensor of the machine has crossed its limit, or is within it again.
- `drain`: a sensor says that the hardware is at fault, and elastic.health=drain that such a machine should be left.

It never touches the ranks: who started them ends them. It ends when its standard input is closed or its parent is
gone. It imports no torch, and all its times come from the monotonic clock, of which it believes only what it has seen:
while the machine, the watchdog or its parent is suspended, no rank grows older.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.elastic.arrivals import Word, read_word
from meshwright.elastic.hang_report import Place, headline, report, write_report
from meshwright.elastic.judge import Verdict, View, judge
from meshwright.elastic.limits import Limits
from meshwright.elastic.machine import MachineWatch
from meshwright.elastic.peers import Peers
from meshwright.elastic.processes import STOPPED, kernel_wait, process_state
from meshwright.elastic.stacks import Frame, take_stacks
from meshwright.elastic.watch_settings import WatchSettings
from meshwright.pulse import read_pulse

INTERVAL_S = 0.5
"""Seconds between two looks at the pulses."""
WARN_STOPPED_S = 2.0
"""How long a rank may be stopped before that is worth a line."""
LEAD_S = 3.0
"""How long before its limit a rank is looked at more closely, so that at the limit one knows whether it moves."""
LONGEST_PAUSE_S = 30.0
"""The most seconds between two closer looks at ranks that are late for a good reason."""
ANSWER_S = 2.0
"""How long ranks get to answer."""
BELIEVED_S = 2.0
"""The most time that passes, for the watchdog, between two of its looks."""


@dataclass
class _Watched:
    """What the watchdog remembers of a rank."""

    pid: int
    started: int
    entered: int = -1
    since: float = 0.0
    """When the rank was first seen in its phase, by the watchdog's own count."""
    halted_since: float | None = None
    warned: str = ""
    stack: tuple[Frame, ...] = ()
    """The last stack that was seen in this phase."""
    moving: bool = False
    silent: bool = False
    """Whether it did not answer when it was last asked in this phase."""


@dataclass
class _Ranks:
    """The ranks of one generation."""

    place: Place
    ranks: dict[int, _Watched]
    world: int
    """How many ranks there are, with those of other machines."""
    told: bool = False
    """Whether a hang of this generation has been told."""
    next_look: float = 0.0
    pause_s: float = LEAD_S
    last: Verdict | None = None
    """What the last closer look gave."""
    last_heard: tuple[int, ...] = ()
    """Which words of other machines that was based on."""

    @property
    def are_all(self) -> bool:
        """Whether no other machine has ranks."""
        return self.world <= len(self.ranks)


class Watchdog:
    """Looks at the ranks of a folder; `look` gives what there is to tell."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.limits = limits
        self.now = 0.0
        """Seconds that it has watched."""
        self._last: float | None = None
        self._asked = 0
        self._source = ""
        self._ranks: _Ranks | None = None
        self._pool = ThreadPoolExecutor(8)
        self._peers = Peers(folder)

    @property
    def place(self) -> Place | None:
        """Whose ranks it watches, once that is known."""
        return self._ranks.place if self._ranks is not None else None

    def look(self) -> list[dict[str, Any]]:
        """One look at all ranks; gives the lines to tell."""
        self._advance()
        self._find_ranks()
        found = self._ranks
        if found is None or found.told:
            return []
        views = {rank: self._view(rank, watched) for rank, watched in found.ranks.items()}
        lines = self._tell_stopped(views) + self._tell_moved(views)
        if not found.are_all:
            self._peers.hear(found.place.generation, self.now)
        worried = self._worth_a_closer_look(views)
        if worried or (views and self._peers.due(self.now)):
            lines += self._judge(views, asks=worried)
        return lines

    def _advance(self) -> None:
        now = time.monotonic()
        passed = now - self._last if self._last is not None else 0.0
        self._last = now
        if process_state(os.getppid()).state != STOPPED:
            self.now += min(passed, BELIEVED_S)

    def _find_ranks(self) -> None:
        try:
            source = (self.folder / "ranks.json").read_text()
        except FileNotFoundError:
            # Not yet there, or ended by the one who started them.
            self._ranks, self._source = None, ""
            return
        except OSError:
            return
        if source != self._source and source.strip():
            try:
                said = json.loads(source)
            except ValueError:
                return  # Not yet written to its end.
            self._source = source
            place = Place(str(said["host"]), int(said["generation"]), Path(said["run_dir"]))
            pids = {int(rank): int(pid) for rank, pid in said["ranks"].items()}
            ranks = {rank: _Watched(pid, process_state(pid).started, since=self.now) for rank, pid in pids.items()}
            self._ranks = _Ranks(place, ranks, int(said.get("world", len(ranks))))
            self._peers.forget()

    def _view(self, rank: int, watched: _Watched) -> View:
        process = process_state(watched.pid)
        if process.started != watched.started and not process.ended:
            # Another process has the number now.
            process = replace(process, state="gone")
        beat = read_pulse(self.folder / f"{rank}.pulse")
        if beat is not None and beat.pid != watched.pid:
            beat = None  # From an earlier generation.
        if beat is not None and beat.entered != watched.entered:
            watched.entered, watched.since = beat.entered, self.now
            watched.stack, watched.moving, watched.silent = (), False, False
        if process.state == STOPPED or process.ended:
            watched.halted_since = self.now if watched.halted_since is None else watched.halted_since
        else:
            watched.halted_since = None
        halted_s = self.now - watched.halted_since if watched.halted_since is not None else 0.0
        limit_s = self.limits.of(beat) if beat is not None else self.limits.first_s
        age_s = self.now - watched.since
        host = self._ranks.place.host if self._ranks is not None else ""
        return View(rank, watched.pid, process, beat, age_s, limit_s, halted_s, watched.moving, host=host)

    def _tell_stopped(self, views: dict[int, View]) -> list[dict[str, Any]]:
        assert self._ranks is not None
        lines = []
        for rank, view in views.items():
            watched = self._ranks.ranks[rank]
            if view.process.state == STOPPED and view.halted_s > WARN_STOPPED_S and not watched.warned:
                watched.warned = "stopped"
                verdict = Verdict("stopped", (rank,))
                text = headline(verdict, views, {}, self._ranks.place)
                text += f"; it may stay so for {self.limits.floor_s:g} s (elastic.hang_floor_s)"
                lines.append(line_of("warning", (rank,), text))
            elif watched.warned == "stopped" and view.process.state != STOPPED and not view.process.ended:
                watched.warned = ""
                lines.append(line_of("cleared", (rank,), f"rank {rank} on {self._ranks.place.host} goes on"))
        return lines

    def _tell_moved(self, views: dict[int, View]) -> list[dict[str, Any]]:
        assert self._ranks is not None
        lines = []
        for rank, view in views.items():
            watched = self._ranks.ranks[rank]
            if watched.warned == "slow" and not view.over:
                watched.warned = ""
                where = f" and is in {view.beat.phase} of step {view.beat.step}" if view.beat is not None else ""
                text = f"rank {rank} on {self._ranks.place.host} went on{where}"
                lines.append(line_of("cleared", (rank,), text))
        return lines

    def _worth_a_closer_look(self, views: dict[int, View]) -> bool:
        assert self._ranks is not None
        soon = any(
            view.age_s > min(view.limit_s - min(LEAD_S, view.limit_s / 4), self.limits.floor_s)
            or (view.process.ended and not view.finished)
            or (view.process.state == STOPPED and view.halted_s > self.limits.floor_s - LEAD_S)
            for view in views.values()
        )
        if not soon:
            self._ranks.next_look, self._ranks.pause_s = 0.0, LEAD_S
            return False
        return self.now >= self._ranks.next_look

    def _judge(self, own: dict[int, View], *, asks: bool) -> list[dict[str, Any]]:
        """A closer look; `asks` when it is because of ranks here, and not because others asked or answered."""
        found = self._ranks
        assert found is not None
        words = self._ask(own)
        own = self._with_stacks(own)
        views = own
        a_round = asks or self._peers.asked
        if not found.are_all:
            place = found.place
            self._peers.tell(place.generation, place.host, own, words, self.now, asks=asks)
            others, their_words = self._peers.fresh(self.now)
            views, words = others | own, their_words | words
        verdict = judge(views, words, world=found.world, floor_s=self.limits.floor_s, longest_s=self.limits.first_s)
        # Ranks are asked one after another: what looks like a standstill may be two moments of ranks that move.
        again = verdict == found.last or verdict.cause not in ("circle", "stalled")
        heard = self._peers.numbers(verdict.guilty)
        if verdict.guilty and not own.keys() & set(verdict.guilty):
            # Their own machine tells; this one does only when that does not, after two words of it.
            again = found.last == verdict and heard != found.last_heard
        found.last, found.last_heard = verdict, heard
        if verdict.certain and not again:
            found.pause_s = LEAD_S
        elif a_round and any(view.age_s > self.limits.floor_s for view in own.values()):
            found.pause_s = min(2 * found.pause_s, LONGEST_PAUSE_S)
        found.next_look = self.now + min(found.pause_s, self._next_limit(views))
        if verdict.cause and verdict.certain and again:
            found.told = True
            return [self._tell_hang(verdict, views, words)]
        lines = []
        if verdict.cause == "late":
            for rank in own.keys() & set(verdict.guilty):
                watched = found.ranks[rank]
                if views[rank].over and not watched.warned:
                    watched.warned = "slow"
                    text = headline(Verdict("late", (rank,), False, verdict.waits), views, words, found.place)
                    lines.append(line_of("warning", (rank,), text))
        return lines

    def _next_limit(self, views: dict[int, View]) -> float:
        """Seconds until the next rank comes to a limit."""
        left = [view.limit_s - view.age_s for view in views.values()]
        left += [self.limits.floor_s - view.halted_s for view in views.values() if view.halted_s]
        return min((seconds for seconds in left if seconds > 0), default=LONGEST_PAUSE_S)

    def _ask(self, views: dict[int, View]) -> dict[int, Word]:
        """What ranks tell of their collectives; of those who do not answer, what they told last."""
        assert self._ranks is not None
        watched = self._ranks.ranks
        self._asked += 1
        temporary = self.folder / ".ask"
        temporary.write_text(str(self._asked))
        temporary.replace(self.folder / "ask")
        halted = {rank for rank, view in views.items() if view.process.ended or view.process.state == STOPPED}
        able = {rank for rank in views if rank not in halted and not watched[rank].silent}
        deadline = time.monotonic() + ANSWER_S
        while True:
            words = {rank: read_word(self.folder, rank, view.pid, self._asked) for rank, view in views.items()}
            answered = {rank for rank, word in words.items() if word is not None and word.answered}
            if able <= answered or time.monotonic() > deadline:
                for rank in able:
                    watched[rank].silent = rank not in answered
                return {rank: word for rank, word in words.items() if word is not None}
            time.sleep(0.1)

    def _with_stacks(self, views: dict[int, View]) -> dict[int, View]:
        assert self._ranks is not None
        alive = {rank: view for rank, view in views.items() if not view.process.ended}
        jobs = {rank: self._pool.submit(take_stacks, view.pid, self.folder, rank) for rank, view in alive.items()}
        found = dict(views)
        for rank, job in jobs.items():
            stacks = job.result()
            watched = self._ranks.ranks[rank]
            if stacks.main:
                watched.moving = watched.moving or bool(watched.stack and watched.stack != stacks.main)
                watched.stack = stacks.main
            kernel = kernel_wait(views[rank].pid)
            found[rank] = replace(views[rank], stacks=stacks, moving=watched.moving, kernel=kernel)
        return found

    def _tell_hang(self, verdict: Verdict, views: dict[int, View], words: dict[int, Word]) -> dict[str, Any]:
        assert self._ranks is not None
        place = self._ranks.place
        text = report(verdict, views, words, place, self.limits, time.monotonic())
        steps = [view.beat.step for view in views.values() if view.beat is not None]
        path = ""
        try:
            path = str(write_report(text, place, max(steps, default=0)))
        except OSError as error:
            print(f"meshwright watchdog: the report could not be written: {error}\n{text}", file=sys.stderr, flush=True)
        text = headline(verdict, views, words, place)
        more: dict[str, Any] = {"report": path, "cause": verdict.cause, "generation": place.generation}
        first = views.get(verdict.guilty[0]) if verdict.guilty else None
        if first is not None and first.host != place.host:
            more["elsewhere"] = {"host": first.host, "detect_s": round(first.age_s, 3)}
            if first.beat is not None:
                more["elsewhere"] |= {"step": first.beat.step, "phase": first.beat.phase}
        return line_of("hang", verdict.guilty, text, **more)


def line_of(kind: str, ranks: tuple[int, ...], text: str, **more: Any) -> dict[str, Any]:
    """A line that the watchdog tells."""
    return {"kind": kind, "ranks": list(ranks), "report": "", "text": text, **more}


def main(arguments: list[str] | None = None) -> None:
    """Watch until there is nobody to tell."""
    parser = argparse.ArgumentParser(prog="meshwright.elastic.watchdog", description="Watches the ranks of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="whoever started it: it ends when that does")
    parser.add_argument("--settings", default="{}", help="JSON")
    given = parser.parse_args(arguments)
    settings = WatchSettings(**json.loads(given.settings))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The one who started it decides when it ends: ranks that save after a signal are still watched.
        signal.signal(number, signal.SIG_IGN)
    watchdog = Watchdog(given.folder, settings.limits)
    machine = (
        MachineWatch(settings.health_limits, drain=settings.health == "drain") if settings.health != "off" else None
    )
    while os.getppid() == given.parent and given.folder.exists():
        lines = watchdog.look()
        if machine is not None and watchdog.place is not None:
            lines += [line_of(kind, (), text) for kind, text in machine.look(watchdog.place)]
        for line in lines:
            try:
                print(json.dumps(line), flush=True)
            except BrokenPipeError:
                os._exit(0)
        ready, _, _ = select.select([sys.stdin], [], [], INTERVAL_S)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            break
    # Threads that still wait for a stack do not matter any more.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
