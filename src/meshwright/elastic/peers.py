"""What the watchdogs of several machines tell each other: how their ranks stand. Without torch.

A watchdog that looks closely at its ranks leaves what it saw in a file; those of the other machines come as files, too
(`watch_exchange` carries them). Who is worried asks by that, and the others look and answer. So each can judge over all
ranks of the run, and says which rank on which machine holds up the others. Times that travel are ages: no machine's
clock is compared with another's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meshwright.elastic.arrivals import Call, Group, Standing, Word
from meshwright.elastic.judge import View
from meshwright.elastic.processes import ProcessState
from meshwright.elastic.stacks import Frame, Stacks
from meshwright.files import replace_text
from meshwright.pulse import Beat

FRESH_S = 10.0
"""How long what another machine told is believed."""
ANSWERED_S = 2.0
"""What was told so short a time ago is the answer to whoever asks now."""
FRAMES_TOLD = 12
CALLS_TOLD = 4
"""How many of the latest calls of each group are told."""
TOLD = "watch-told.json"


def heard_from(node: int) -> str:
    """The name of the file with what the watchdog of a machine has told."""
    return f"watch-heard-{node}.json"


@dataclass
class _Machine:
    """What a machine told last."""

    heard: float
    number: int
    host: str
    views: dict[int, View] = field(default_factory=dict)
    words: dict[int, Word] = field(default_factory=dict)


class Peers:
    """The other machines, as this one's watchdog knows them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: dict[str, _Machine] = {}
        # What lies there already was told nobody knows when.
        self._texts = {path: path.read_text() for path in self._files()}
        self._told = 0
        self._told_at = self._asked_at = float("-inf")
        self.asked = False
        """Whether another watchdog wants to know how the ranks here stand."""
        self._answered = False

    def _files(self) -> list[Path]:
        return list(self._folder.glob("watch-heard-*.json"))

    def forget(self) -> None:
        """Other ranks are watched from now on."""
        self._machines, self.asked, self._answered = {}, False, False
        self._asked_at = float("-inf")

    def hear(self, generation: int, now: float) -> None:
        """Take in what others have told of the ranks of this generation."""
        for path in self._files():
            try:
                text = path.read_text()
                if text == self._texts.get(path):
                    continue
                said = json.loads(text)
                machine = _Machine(now, said["number"], said["host"])
                for one in said["ranks"]:
                    machine.views[one["rank"]] = _view(one, said["host"])
                    if one["word"] is not None:
                        machine.words[one["rank"]] = _word(one["word"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # Gone meanwhile, or of another release: that machine stays unseen.
            self._texts[path] = text
            if said["generation"] == generation:
                self._machines[str(path)] = machine
                # Who asks just after this machine has told finds that as its answer.
                self.asked = self.asked or (said["asks"] and now - self._told_at >= ANSWERED_S)
                self._answered = self._answered or not said["asks"]

    def due(self, now: float) -> bool:
        """Whether others want to know how the ranks here stand, or have answered."""
        if now - self._told_at < ANSWERED_S:
            return False
        return self.asked or (self._answered and now - self._asked_at < FRESH_S)

    def tell(
        self,
        generation: int,
        host: str,
        views: Mapping[int, View],
        words: Mapping[int, Word],
        now: float,
        *,
        asks: bool,
    ) -> None:
        """Leave how the ranks here stand for the others; `asks` for theirs."""
        self._told += 1
        self._told_at, self.asked, self._answered = now, False, False
        if asks:
            self._asked_at = now
        ranks = [_plain_view(view) | {"word": _plain_word(words.get(rank))} for rank, view in views.items()]
        said = {"generation": generation, "host": host, "number": self._told, "asks": asks, "ranks": ranks}
        replace_text(self._folder / TOLD, json.dumps(said))

    def fresh(self, now: float) -> tuple[dict[int, View], dict[int, Word]]:
        """The ranks of other machines, as far as what was told of them is fresh."""
        views: dict[int, View] = {}
        words: dict[int, Word] = {}
        for machine in self._machines.values():
            if now - machine.heard <= FRESH_S:
                views |= machine.views
                words |= machine.words
        return views, words

    def numbers(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Which words of their machines are known of some ranks."""
        return tuple(one.number for rank in ranks for one in self._machines.values() if rank in one.views)


def _plain_view(view: View) -> dict[str, Any]:
    beat = view.beat
    return {
        "rank": view.rank,
        "pid": view.pid,
        "state": view.process.state,
        "beat": None if beat is None else {one.name: getattr(beat, one.name) for one in fields(Beat)},
        "age_s": view.age_s,
        "limit_s": view.limit_s,
        "halted_s": view.halted_s,
        "moving": view.moving,
        "kernel": view.kernel,
        "stack": [[frame.file, frame.line, frame.function] for frame in view.stacks.main[:FRAMES_TOLD]],
        "holds_gil": view.stacks.holds_gil,
        "source": view.stacks.source,
        "problem": view.stacks.problem,
    }


def _view(said: dict[str, Any], host: str) -> View:
    main = tuple(Frame(str(file), int(line), str(function)) for file, line, function in said["stack"])
    return View(
        int(said["rank"]),
        int(said["pid"]),
        ProcessState(str(said["state"])),
        Beat(**said["beat"]) if said["beat"] is not None else None,
        float(said["age_s"]),
        float(said["limit_s"]),
        float(said["halted_s"]),
        bool(said["moving"]),
        Stacks(main, (), said["holds_gil"], said["source"], said["problem"]),
        host,
        str(said["kernel"]),
    )


def _plain_word(word: Word | None) -> dict[str, Any] | None:
    if word is None:
        return None
    groups = []
    for (name, ranks), standing in word.groups.items():
        numbers = sorted(standing.calls)
        told = {number for number in numbers if number in numbers[-CALLS_TOLD:] or number == standing.waits_at}
        groups.append(
            {
                "name": name,
                "ranks": ranks,
                "description": word.descriptions.get((name, ranks), ""),
                "called": standing.called,
                "done": standing.done,
                "gaps": standing.has_gaps,
                "calls": [vars(standing.calls[number]) for number in sorted(told)],
            }
        )
    return {"told_s": time.monotonic() - word.time, "answered": word.answered, "groups": groups}


def _word(said: dict[str, Any]) -> Word:
    word = Word(time.monotonic() - float(said["told_s"]), bool(said["answered"]))
    for one in said["groups"]:
        group: Group = (str(one["name"]), tuple(one["ranks"]))
        calls = {call["number"]: _call(call) for call in one["calls"]}
        word.groups[group] = Standing(int(one["called"]), int(one["done"]), calls, bool(one["gaps"]))
        word.descriptions[group] = str(one["description"])
    return word


def _call(said: dict[str, Any]) -> Call:
    return Call(
        int(said["number"]),
        str(said["operation"]),
        tuple(map(tuple, said["inputs"])),
        tuple(map(tuple, said["outputs"])),
        tuple(said["dtypes"]),
        bool(said["done"]),
    )
