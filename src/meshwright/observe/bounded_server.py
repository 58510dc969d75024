"""A web server with a thread for each connection, of which there are only so many."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any


class BoundedServer(ThreadingHTTPServer):
    """Answers on threads of its own; a connection too many is closed at once."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that the kernel holds until this process gets to them. Past that it drops them without a word, and a
    client asks again after a second, then two, then four: busy steps must not cost anyone that."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], connections: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # As the standard library does, without asking a name service what this machine is called.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever goes away in the middle is nothing to tell."""
