"""Connections beyond the bound are closed at once, and those that end make room."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

from meshwright.observe.bounded_server import BoundedServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def ask(connection: socket.socket) -> bytes:
    """The answer to a request; nothing where the other side hangs up."""
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(100)
    except ConnectionError:
        return b""


def test_a_connection_too_many_is_closed_and_one_that_ends_makes_room() -> None:
    server = BoundedServer(("127.0.0.1", 0), Answer, connections=2)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        address = ("127.0.0.1", server.server_port)
        silent = [socket.create_connection(address, timeout=10) for _ in range(2)]
        with socket.create_connection(address, timeout=10) as third:
            assert ask(third) == b""
        for connection in silent:
            connection.close()
        deadline = time.monotonic() + 10
        while True:
            with socket.create_connection(address, timeout=10) as later:
                if ask(later).startswith(b"HTTP/1.0 204"):
                    break
            assert time.monotonic() < deadline, "those that ended have left no room"
            time.sleep(0.02)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
