"""`meshwright watch RUN`: a run on a terminal, read from its folder by another process than those that train.

On a terminal a picture that is drawn anew, on the alternate screen, until q or Ctrl-C. Elsewhere a line when there is
something new, until the run is over. Nothing is written to the run folder.
"""

from __future__ import annotations

import select
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from meshwright.observe.event_words import plain, sentence
from meshwright.observe.picture import Shown, clock, draw
from meshwright.observe.view import RunView

OVER = ("finished", "stopped", "failed")
REFRESH_S = 1.0
LINE_S = 5.0
"""Seconds between two lines of steps where there is no terminal."""


class Watched:
    """A run folder, read again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run = RunView(path)

    def look(self) -> Shown:
        """The run as it is now."""
        return Shown(self._run.refresh(), model_of(self.path))


def model_of(path: Path) -> str:
    """The model's name, as the configuration has it."""
    try:
        held = tomllib.loads((path / "config.toml").read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError):
        return ""
    if not isinstance(held, dict):
        return ""
    name = held.get("preset") or held.get("from_hf") or ""
    return Path(name).name if isinstance(name, str) else ""


def watch(path: Path, once: bool = False, console: Console | None = None) -> int:
    """Show a run: one picture of it, or as it goes on."""
    watched = Watched(path)
    console = console or Console(highlight=False, markup=False, emoji=False)
    if once:
        console.print(draw(watched.look(), console.width, None))
        return 0
    with _ending_on_signals():
        if console.is_terminal:
            _show(watched, console)
        else:
            _tell(watched)
    return 0


def _show(watched: Watched, console: Console) -> None:
    """A picture that is drawn anew until q."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = watched.look()
            live.update(draw(shown, console.width, console.height), refresh=True)
            until = time.monotonic() + REFRESH_S
            while (left := until - time.monotonic()) > 0:
                size = console.size
                if pressed(min(left, 0.2)) in ("q", "Q", "\x03", "\x04"):
                    return
                if console.size != size:
                    break


def _tell(watched: Watched) -> None:
    """Lines, until the run is over."""
    told_events, told_step, told_at = 0, -1, float("-inf")
    while True:
        shown = watched.look()
        view = shown.view
        for event in view.events[told_events:]:
            _say(sentence(event))
        told_events = len(view.events)
        over = view.state in OVER
        if view.step != told_step and (over or time.monotonic() - told_at >= LINE_S):
            _say(status(shown))
            told_step, told_at = view.step, time.monotonic()
        if over:
            _say(f"{view.state}{f': {plain(view.reason)}' if view.reason else ''}")
            return
        time.sleep(REFRESH_S)


def status(shown: Shown) -> str:
    """A run in one line."""
    view = shown.view
    words = [f"step {view.step}" + (f"/{view.steps}" if view.steps else "")]
    if (loss := view.curves.last("loss")) is not None:
        words.append(f"loss {loss:.4f}")
    if (pace := view.curves.mean("tokens_per_s")) is not None:
        words.append(f"{pace:,.0f} tokens/s (mean of {view.curves.averaged('tokens_per_s')} steps)")
    if view.goodput.wall_s > 0:
        words.append(f"goodput {view.goodput.share:.0%}")
    if (computing := view.efficiency) is not None:
        words.append(f"computing {computing.share:.0%}")
    words += [f"rank {rank.rank} slow in {plain(rank.straggler.get('phase'))}" for rank in view.ranks if rank.straggler]
    if view.steps and view.step_s and view.state == "running":
        words.append(f"ETA {clock(view.step_s * max(0, view.steps - view.step))}")
    return "  ".join(words)


def _say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Signals that end a process end it here with everything put back: the terminal is not left as it was drawn on."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous: dict[int, Any] = {}
    for ending in (signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # Only a main thread may.
            previous[ending] = signal.signal(ending, leave)
    try:
        yield
    except KeyboardInterrupt:
        # Ctrl-C is how one leaves, and no fault.
        pass
    finally:
        for ended, handler in previous.items():
            signal.signal(ended, handler)


@contextmanager
def _keys() -> Iterator[Any]:
    """Gives a function that waits some seconds for a key; keys come at once and unseen while the context lasts."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str | None:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return sys.stdin.read(1) if ready else None

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
