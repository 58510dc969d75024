"""Where no Ray is, a launch says so and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.conftest import CommandLine
from tests.ports import free_ports

pytestmark = pytest.mark.usefixtures("own_folder")
RUN = ("run.dir=runs/tiny", "model.preset=tiny", "data.sequence_length=32", "train.global_batch=8", "--on", "ray")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Page(BaseHTTPRequestHandler):
    """A page to sign in."""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        text = b"<html>Sign in</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def something_else() -> Iterator[str]:
    """HOST:PORT of a server that is no Ray; Ray takes 127.0.0.1 for another address of this machine."""
    server = ThreadingHTTPServer(("127.0.0.2", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.2:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refused(meshwright: CommandLine, address: str, **variables: str) -> str:
    ended = meshwright("launch", *RUN, "--ray-address", address, timeout=45, **variables)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_an_address_where_nothing_answers_is_told_at_once(meshwright: CommandLine) -> None:
    (port,) = free_ports(1)
    assert f"no Ray answers at 127.0.0.2:{port}: " in refused(meshwright, f"127.0.0.2:{port}")


@pytest.mark.alone  # A Ray of another test would be taken instead.
def test_a_ray_of_this_machine_that_was_killed_is_told_at_once(meshwright: CommandLine, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.2:{port}")
    told = refused(meshwright, "auto", RAY_TMPDIR=str(tmp_path), RAY_ADDRESS="")
    assert f"no Ray answers at auto, which Ray takes for 127.0.0.2:{port}: " in told


def test_something_else_at_the_address_is_no_ray(meshwright: CommandLine) -> None:
    with something_else() as address:
        assert f"no Ray answers at {address}, but something else" in refused(meshwright, address)
        assert f"at http://{address}: what answers there is something else" in refused(meshwright, f"http://{address}")


@pytest.mark.parametrize("address", ["no such thing", "head", "head:port", "6379", "http://", "10.0.0.1:6379:8265"])
def test_an_address_that_is_none_is_refused_in_a_dry_run_too(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["launch", *RUN, "--ray-address", address, "--dry-run", "review"]) == 2
    assert f"--ray-address '{address}' is neither http://HOST:8265 nor HOST:PORT" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["launch", *RUN, "--dry-run", "review"]) == 2
    assert f"RAY_ADDRESS '{address}' is neither" in capsys.readouterr().err


@pytest.mark.parametrize("cpus", ["-1", "0", "nan", "inf"])
def test_no_rank_takes_less_than_a_part_of_a_cpu(cpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *RUN, f"--ray-cpus={cpus}", "--dry-run", "review"]) == 2
    assert f"--ray-cpus {cpus}: a rank takes more than none" in capsys.readouterr().err
