"""Hold back work beside the training, so that it takes no more than a share of a core from it."""

from __future__ import annotations

import threading
import time


class Pace:
    """Work calls `breathe` often; it sleeps as long as the work's own CPU time since the last call asks for."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` of one core; 1 does not hold back."""
        self._share = share
        self._hurry = threading.Event()
        self._used: float | None = None

    def hurry(self) -> None:
        """Somebody waits: hold back no more."""
        self._hurry.set()

    def breathe(self) -> None:
        """Sleep for a while, if it is time."""
        used = time.thread_time()
        spent, self._used = used - (self._used if self._used is not None else used), used
        if self._share < 1:
            self._hurry.wait(spent * (1 / self._share - 1))
