"""Ports of loopback for servers of tests that must be told theirs."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody has; held together, so that they differ."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
