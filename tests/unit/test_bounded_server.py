"""A server beside a training: connections that come while its process is busy wait, and are not dropped."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

from meshwright.observe.bounded_server import BoundedServer


def test_connections_wait_for_a_process_that_is_busy() -> None:
    with BoundedServer(("127.0.0.1", 0), BaseHTTPRequestHandler, connections=4) as server, ExitStack() as clients:
        # Nobody takes them yet. One that the kernel drops is tried again after a second.
        for _ in range(20):
            clients.enter_context(socket.create_connection(server.server_address[:2], timeout=0.5))
