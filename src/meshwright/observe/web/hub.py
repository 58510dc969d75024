"""One reader of the runs for all browsers: each gets everything once, and from then on what has changed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshwright.observe.snapshot import clean, difference, snapshot, to_text
from meshwright.observe.view import RunView

MOST_CLIENTS = 16
WAITING = 32
"""Messages that a browser may be behind; one that is slower is cut off, and asks for everything anew."""
REST = 10
"""Reading takes at most this part of the time of one core: very long runs are shown a little later."""


class TooManyClients(Exception):
    """No further browser is served."""


class Client:
    """One browser's queue of messages; None says that it is over."""

    def __init__(self) -> None:
        self.messages: queue.Queue[str | None] = queue.Queue(WAITING)

    def put(self, message: str | None) -> bool:
        """Whether there was room."""
        try:
            self.messages.put_nowait(message)
        except queue.Full:
            return False
        return True


class Hub:
    """Reads the runs every `interval_s` seconds while somebody looks."""

    def __init__(self, runs: Sequence[RunView], interval_s: float = 0.5) -> None:
        self._runs = runs
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._data: dict[str, Any] = {"runs": []}
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch-runs", daemon=True)
        self._thread.start()

    def data(self) -> str:
        """The runs as they are now."""
        with self._lock:
            return to_text(self._refresh())

    def join(self) -> Client:
        """A client that gets everything as its first message."""
        with self._lock:
            if len(self._clients) >= MOST_CLIENTS or self._closed.is_set():
                raise TooManyClients
            self._refresh()
            client = Client()
            client.put(to_text({"all": self._data}))
            self._clients.add(client)
            self._wanted.set()
            return client

    def leave(self, client: Client) -> None:
        """The browser has gone."""
        with self._lock:
            self._clients.discard(client)
            if not self._clients:
                self._wanted.clear()

    def close(self) -> None:
        """End all streams and the reading."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(10)
        with self._lock:
            for client in self._clients:
                _end(client)

    def _refresh(self) -> dict[str, Any]:
        """Read the runs and tell all clients what has changed. The lock is held."""
        new = clean(snapshot([run.refresh() for run in self._runs]))
        changed = difference(self._data, new) if self._data["runs"] else None
        self._data = new
        if changed is not None:
            message = to_text({"changes": changed})
            for client in [client for client in self._clients if not client.put(message)]:
                self._clients.discard(client)
                _end(client)
        return new

    def _follow(self) -> None:
        pause = self._interval_s
        while not self._closed.is_set():
            self._wanted.wait()
            if self._closed.wait(pause):
                return
            began = time.perf_counter()
            with self._lock:
                self._refresh()
            pause = max(self._interval_s, REST * (time.perf_counter() - began))


def _end(client: Client) -> None:
    """Have a client's stream end, whatever it has not read yet."""
    while not client.put(None):
        with suppress(queue.Empty):
            client.messages.get_nowait()
