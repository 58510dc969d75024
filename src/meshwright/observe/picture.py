"""A run as a picture for a terminal of some size: what is read of it, laid out in lines. Without torch.

The picture fits: with many ranks it shows those that need a look first (lost, slow, longest at work).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.observe.curves import RECENT_STEPS, number
from meshwright.observe.efficiency import GOAL, hidden_and_idle
from meshwright.observe.event_words import plain, sentence, slowness
from meshwright.observe.goodput import WORDS
from meshwright.observe.rank_bar import bar, legend, scale, sparkline
from meshwright.observe.rank_files import parts_of
from meshwright.observe.rank_times import BESIDE
from meshwright.observe.tail import Line
from meshwright.observe.view import Rank, View

WAITING = ("communication", "bubble", "unattributed")
"""Parts of a step in which a rank does nothing of its own."""
LEAST_EVENTS = 4
STATE_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "restarting": "bold yellow",
    "silent": "bold yellow",
    "failed": "bold red",
    "alive": "green",
    "lost": "bold red",
}
EVENT_STYLES = {
    "failed": "red",
    "hang": "red",
    "straggler": "yellow",
    "restarted": "green",
    "rollback": "yellow",
    "finished": "green",
}


@dataclass(frozen=True)
class Shown:
    """What a picture is made of."""

    view: View
    model: str


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes as people say them."""
    for bytes_, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB")):
        if count >= bytes_:
            return f"{count / bytes_:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def own_seconds(rank: Rank) -> float:
    """Seconds of a step that a rank spends on something of its own."""
    return sum(seconds for name, seconds in rank.record.split_parts().items() if name not in WAITING)


def worst_first(ranks: list[Rank]) -> list[Rank]:
    """Those that need a look first: lost, slow, longest at work."""
    return sorted(ranks, key=lambda rank: (rank.state != "lost", rank.straggler is None, -own_seconds(rank)))


def draw(shown: Shown, width: int, height: int | None) -> RenderableType:
    """The picture; without a height as long as it wants to be."""
    view = shown.view
    top = [_title(shown, width), _progress(view, width), *_curves(view, width), *_skips(view, width)]
    top += _shares(shown, width)
    # Of what is left, rules and the table's head and legend take four lines and the events at least some.
    room = len(view.ranks) if height is None else height - len(top) - 4 - LEAST_EVENTS
    # A picture never has more ranks than a person would read.
    count = max(1, min(len(view.ranks), room, 40))
    parts: list[RenderableType] = [*top, _rule(_ranks_title(view, count), width)]
    used = len(top) + 1
    if view.ranks:
        parts += _table(view, count, width)
        used += count + 2
    parts.append(_rule("latest events" if height is None else "latest events (q: leave)", width))
    left = 10 if height is None else max(1, height - used - 1)
    parts += _events(view, left, width)
    return Group(*parts)


def _line(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def _rule(title: str, width: int) -> Text:
    return _line(Text(f"── {title} ".ljust(width, "─"), "dim"), width)


def _title(shown: Shown, width: int) -> Text:
    view = shown.view
    state = Text(view.state, STATE_STYLES.get(view.state, "bold"))
    if view.reason:
        state.append(f": {plain(view.reason)}", "not bold")
    state.truncate(width // 2, overflow="ellipsis")
    ranks = f"{view.world} rank{'s' * (view.world != 1)}" + (f" on {plain(view.device)}" if view.device else "")
    text = Text(plain(view.name), "bold")
    text.append(
        "  " + "  ".join(word for word in (plain(shown.model), plain(view.strategy_text), ranks) if word), "not bold"
    )
    # Letters of some scripts are two columns wide.
    room = max(0, width - state.cell_len - 2)
    text.truncate(room, overflow="ellipsis")
    return Text.assemble(text, " " * (width - text.cell_len - state.cell_len), state)


def _progress(view: View, width: int) -> Text:
    steps = f"step {view.step}" + (f"/{view.steps}" if view.steps else "")
    words = [f"{view.step_s:.3g} s a step"] if view.step_s else []
    if view.steps and view.step_s and view.state in ("running", "restarting"):
        words.append(f"ETA {clock(view.step_s * max(0, view.steps - view.step))}")
    if view.age_s is not None and view.state in ("running", "restarting", "silent"):
        words.append(f"last sign {clock(view.age_s)} ago")
    tail = "  ".join(words)
    room = max(4, min(60, width - len(steps) - len(tail) - 4))
    done = round(min(1.0, view.step / view.steps) * room) if view.steps else 0
    text = Text(f"{steps}  ")
    text.append("━" * done, "green")
    text.append("─" * (room - done), "dim")
    text.append(f"  {tail}")
    return _line(text, width)


def _curves(view: View, width: int) -> list[Text]:
    found = []
    for name, title, form in (("loss", "loss", "{:.4f}"), ("tokens_per_s", "tokens/s", "{:,.0f}")):
        value = view.curves.last(name) if name == "loss" else view.curves.mean(name)
        head = f"{title:<9}{form.format(value) if value is not None else '-':>10}  "
        held_out = view.curves.last("eval_loss") if name == "loss" else None
        tail = f"  held-out {held_out:.4f}" if held_out is not None else ""
        if name == "tokens_per_s" and value is not None:
            mfu, steps = view.curves.mean("mfu"), f"of {view.curves.averaged(name)} steps"
            tail += f"  mean {steps}" if mfu is None else f"  MFU {mfu:.1%}, means {steps}"
        values = [value for _, value in view.curves.points(name)]
        # The first steps would press all later ones into one line.
        values = values[len(values) // 20 :] if name == "loss" else values[1:] or values
        found.append(_line(Text(head + sparkline(values, width - len(head) - len(tail)) + tail), width))
    return found


def _skips(view: View, width: int) -> list[Text]:
    """Steps without an update, where there are any: overflows of fp16 have no event of their own."""
    count = len(view.skipped)
    if not count:
        return []
    words = f"step{'s' * (count > 1)} without an update, the last {view.skipped[-1]}"
    return [_line(Text(f"skipped  {count:>10,}  {words}"), width)]


def _shares(shown: Shown, width: int) -> list[Text]:
    found = []
    if shown.view.goodput.wall_s > 0:
        rest = [(name, share) for name, share in shown.view.goodput.losses() if share >= 0.005]
        words = ", ".join(f"{WORDS.get(name, name)} {share:.0%}" for name, share in rest[:6])
        whole = f"goodput   {shown.view.goodput.share:>9.0%}  of {clock(shown.view.goodput.wall_s)}"
        found.append(_line(Text(whole + (f"; {words}" if words else "")), width))
    computing = shown.view.efficiency
    if computing is not None:
        share = computing.share
        style = "green" if share >= GOAL else "yellow"
        text = Text(f"computing {share:>9.0%}  ")
        text.append(scale(share, 12, GOAL), style)
        text.append(f"  goal {GOAL:.0%}, else exposed{_beside(shown.view)}", "dim")
        found.append(_line(text, width))
    return found


def _beside(view: View) -> str:
    """What profiled steps tell of communication that computing has hidden, and of idle time."""
    found = hidden_and_idle(rank.record for rank in view.ranks)
    return "" if found is None else f"; hidden {found[0]:.0%}, idle {found[1]:.0%}"


def _ranks_title(view: View, count: int) -> str:
    if not view.ranks:
        return "no rank has said anything yet"
    return "ranks" if count >= len(view.ranks) else f"{count} of {len(view.ranks)} ranks, those that need a look first"


def _table(view: View, count: int, width: int) -> list[RenderableType]:
    chosen = view.ranks if count >= len(view.ranks) else worst_first(view.ranks)[:count]
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, width=width, header_style="dim")
    wide = width >= 110
    room = max(10, min(60, width - (76 if wide else 56)))
    for title, style in (("rank", ""), ("place", "dim"), ("state", "")):
        table.add_column(title, style=style, no_wrap=True)
    table.add_column("a step's time", width=room, no_wrap=True)
    for title in ("tokens/s", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("slow in", ratio=1, no_wrap=True, overflow="ellipsis")
    names: set[str] = set()
    for rank in chosen:
        parts = rank.record.split_parts()
        names |= {name for name, seconds in parts.items() if seconds > 0}
        table.add_row(
            str(rank.rank),
            " ".join(f"{axis}{place}" for axis, place in rank.coordinates.items() if _split(view, axis)),
            Text(rank.state, STATE_STYLES.get(rank.state, "dim")),
            bar(parts, room),
            _tokens(view, rank),
            _memory(rank),
            _mark(rank, wide),
        )
    return [table, _line(legend(sorted(names)), width)]


def _split(view: View, axis: str) -> bool:
    return any(rank.coordinates.get(axis) for rank in view.ranks)


def _tokens(view: View, rank: Rank) -> str:
    """A rank's share of the tokens, by what its own last steps take without what comes after the update."""
    pace, step_s = view.curves.last("tokens_per_s"), view.curves.last("step_s")
    recent = list(rank.record.steps)[-RECENT_STEPS:]
    taken = [seconds for line in recent if (seconds := _until_updated(line)) > 0]
    if pace is None or step_s is None or not taken or not view.world:
        return "-"
    # By all of their time, as the run's own speed.
    return f"{pace * step_s / view.world / fmean(taken):,.0f}"


def _until_updated(line: Line) -> float:
    parts = parts_of(line)
    return (number(line.get("seconds")) or 0.0) - sum(parts.get(name, 0.0) for name in BESIDE)


def _memory(rank: Rank) -> str:
    memory = rank.memory
    held = memory.get("peak") or memory.get("reserved") or memory.get("rss")
    return size(held) if held else "-"


def _mark(rank: Rank, wide: bool) -> Text:
    """What is wrong with a rank."""
    slow = rank.straggler
    if slow is None:
        return Text("")
    factor = slowness(slow)
    words = plain(slow.get("phase")) + (f" x{factor:.1f}" if factor else "")
    if wide and (host := rank.record.start.get("host")):
        words += f" on {plain(host)}"
    return Text(words, "bold yellow")


def _events(view: View, count: int, width: int) -> list[RenderableType]:
    found: list[RenderableType] = []
    for event in view.events[-count:]:
        text = Text(f"{_when(event)}  ", "dim")
        text.append(sentence(event), EVENT_STYLES.get(event["event"], "not dim"))
        found.append(_line(text, width))
    return found


def _when(event: Mapping[str, Any]) -> str:
    moment = number(event.get("time"))
    return (
        time.strftime("%H:%M:%S", time.localtime(moment)) if moment is not None and 0 <= moment < 1e11 else "--:--:--"
    )
