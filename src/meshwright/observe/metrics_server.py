"""A small HTTP server for scrapers, which never holds up the process that it is in.

A scraper that is slow, or never reads, holds one of few threads for a few seconds.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from meshwright.address import Address
from meshwright.observe.bounded_server import BoundedServer

CONNECTIONS = 8
"""Scrapers that are answered at a time; more are sent away."""
ANSWER_S = 5.0
"""How long one may wait between two reads; twice that for all of it."""


class MetricsServer(BoundedServer):
    """Answers few scrapers at a time, each within a limit."""

    block_on_close = False

    def __init__(self, address: Address, token: str | None, answer: Callable[[str], tuple[bytes, str]]) -> None:
        """`answer` gives the text, and its kind, for a scraper that accepts some kinds."""
        self.token, self.answer = token, answer
        super().__init__((address.host, address.port), _Handler, CONNECTIONS)

    def start(self) -> None:
        """Answer from now on, on threads of its own."""
        # How often it looks whether to stop, which the end of a run waits for.
        threading.Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """GET /metrics, with the token where there is one."""

    server: MetricsServer
    timeout = ANSWER_S

    def setup(self) -> None:
        super().setup()
        # A read that ends in time may be followed by another, for ever: this ends the connection as a whole.
        self._limit = threading.Timer(2 * ANSWER_S, self._cut)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer a scrape."""
        if not self._allowed():
            self._answer(401, b"a bearer token is needed\n", "text/plain", {"WWW-Authenticate": "Bearer"})
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"metrics are at /metrics\n", "text/plain")
        else:
            self._answer(200, *self.server.answer(self.headers.get("Accept") or ""))

    def _allowed(self) -> bool:
        token = self.server.token
        shown = self.headers.get("Authorization") or ""
        return token is None or hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())

    def _answer(self, code: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""
