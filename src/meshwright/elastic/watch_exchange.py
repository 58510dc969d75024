"""Carries what the watchdogs of several machines tell each other through the store.

A watchdog has no torch and no network: it leaves a file, and finds those of the others beside it. This is a thread of
the process that holds the meeting, with a connection of its own.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from meshwright.elastic.peers import TOLD, heard_from
from meshwright.elastic.rendezvous import Endpoint, connect
from meshwright.errors import UserError
from meshwright.files import replace_text
from meshwright.parallel.torch_releases import Store

TOLD_KEY = "meshwright/watch"
"""Key of how often watchdogs have told something; with the number of a machine, of what its watchdog told last."""
PERIOD_S = 0.5
MOST_READERS = 64
"""On more machines than this only the first one hears all others: what each tells would be sent too often."""


class WatchExchange:
    """One machine's part in what watchdogs tell each other."""

    def __init__(self, endpoint: Endpoint, folder: Path) -> None:
        self._endpoint, self._folder = endpoint, folder
        self._place = (-1, 0, 0)
        self._seen = -1
        self._told = ""
        self._heard: dict[int, str] = {}

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._run, daemon=True).start()

    def join(self, generation: int, node: int, nodes: int) -> None:
        """This machine is that one of so many, for this generation."""
        self._place = (generation, node, nodes)

    def _run(self) -> None:
        try:
            store = connect(self._endpoint)
            while self._folder.exists():
                self._tell(store)
                self._hear(store)
                time.sleep(PERIOD_S)
        except (RuntimeError, UserError, OSError):
            # The store is lost, which others here notice and tell; or the run is over.
            return

    def _tell(self, store: Store) -> None:
        generation, node, _ = self._place
        try:
            text = (self._folder / TOLD).read_text()
        except FileNotFoundError:
            return
        if text != self._told and json.loads(text)["generation"] == generation:
            self._told = text
            store.set(f"{TOLD_KEY}/{node}", text)
            store.add(TOLD_KEY, 1)

    def _hear(self, store: Store) -> None:
        _, node, nodes = self._place
        count = store.add(TOLD_KEY, 0)
        if count == self._seen or (nodes > MOST_READERS and node > 0):
            return
        self._seen = count
        for other in range(nodes):
            if other == node:
                continue
            # Unlike `get` it does not wait for a machine that has told nothing yet.
            text = store.compare_set(f"{TOLD_KEY}/{other}", "", "").decode()
            if text and text != self._heard.get(other):
                self._heard[other] = text
                replace_text(self._folder / heard_from(other), text)
