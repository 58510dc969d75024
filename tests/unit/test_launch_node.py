"""A machine's part in a launched run: what it ends with."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator

import pytest

from meshwright.launch import node
from tests.ports import free_ports


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("ends", "told"), [(9, 5), (7, 7)])
def test_a_quarantined_machine_that_serves_the_store_ends_the_run(
    ends: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "TRAIN", [sys.executable, "-c", f"raise SystemExit({ends})"])
    monkeypatch.setattr(node, "LINGER_S", 0.1)
    (port,) = free_ports(1)
    words = ["--nodes", "2:4", "--rank", "0", "--rendezvous", f"127.0.0.1:{port}", "--run-id", "a", "--", "run.toml"]
    assert node.main(words) == told


def test_a_quarantined_machine_beside_the_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "TRAIN", [sys.executable, "-c", "raise SystemExit(9)"])
    with socket.create_server(("127.0.0.1", 0)) as store:
        endpoint = f"127.0.0.1:{store.getsockname()[1]}"
        words = ["--nodes", "2:4", "--rendezvous", endpoint, "--run-id", "a", "--", "run.toml"]
        assert node.main(words) == 9
        assert node.main(["--rank", "1", *words]) == 9
