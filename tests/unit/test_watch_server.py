"""The server of the page: what it shows, to whom, and what it refuses."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from meshwright.address import is_loopback
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.observe.view import RunView
from meshwright.observe.web import hub
from meshwright.observe.web.access import Access
from meshwright.observe.web.assets import SCRIPTS, STYLE
from meshwright.observe.web.server import PageServer
from meshwright.secrets import read_token
from meshwright.strategy import Strategy
from tests.run_folders import append_steps, write_run

TOKEN = "a-token-of-32-characters-0123456"


class Client:
    """Speaks HTTP to a server, one request a connection."""

    def __init__(self, server: PageServer) -> None:
        self.server = server
        self.port = int(server.server_address[1])

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        sent = {"Host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))


Start = Callable[..., Client]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None)


@pytest.fixture
def start(run_folder: Path) -> Iterator[Start]:
    """Serves a run; ends with the test."""
    servers = []

    def begin(token: str | None = None) -> Client:
        server = PageServer([RunView(run_folder)], token=token)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return Client(server)

    yield begin
    for server in servers:
        server.close()


def test_the_page_its_files_and_the_data_are_served(start: Start) -> None:
    client = start()
    assert client.ask("/")[0] == 200
    for name in (*SCRIPTS, STYLE):
        status, headers, _ = client.ask(f"/assets/{name}")
        assert status == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
    status, headers, body = client.ask("/data")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["runs"][0]["step"] == 10


def test_every_answer_forbids_scripts_from_elsewhere(start: Start) -> None:
    client = start()
    for path in ("/", "/data", "/assets/main.js", "/nothing"):
        policy = client.ask(path)[1]["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy


def test_the_page_has_no_script_or_style_of_its_own(start: Start) -> None:
    page = start().ask("/")[2]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=|javascript:", page)
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil", "8.8.8.8"]
)
def test_names_that_are_not_this_server_get_nothing(start: Start, name: str) -> None:
    client = start()
    for path in ("/", "/data", "/events", "/assets/main.js"):
        status, _, body = client.ask(path, Host=name)
        assert status == 421
        assert "runs" not in body


@pytest.mark.parametrize("name", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
def test_the_names_of_loopback_are_answered(start: Start, name: str) -> None:
    assert start().ask("/data", Host=name)[0] == 200


def test_a_request_without_a_name_gets_nothing(start: Start) -> None:
    assert b" 421 " in start().raw(b"GET /data HTTP/1.0\r\n\r\n").splitlines()[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/data", "/login"])
def test_nothing_can_be_written(start: Start, method: str, path: str) -> None:
    status, headers, _ = start().ask(path, method, "x=1" if method != "TRACE" else None)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


def test_head_gives_headers_alone(start: Start) -> None:
    client = start()
    status, headers, body = client.ask("/data", "HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py", "/assets/..%2f..%2fserver.py", "/assets/%2e%2e/server.py", "/assets//etc/passwd",
        "/../../../../etc/passwd", "/assets/server.py", "/assets/", "/assets/page.html", "/assets/login.html",
        "/etc/passwd", "/run.json", "//etc/passwd", "/assets/main.js%00.css", "/assets/page.css/../../access.py",
    ],
)  # fmt: skip
def test_only_the_files_of_the_page_can_be_had(start: Start, path: str) -> None:
    client = start()
    status, _, body = client.ask(path)
    assert status == 404
    assert body == "there is nothing here\n"
    answer = client.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert b" 404 " in answer.splitlines()[0]


def test_another_address_than_loopback_needs_a_token(run_folder: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UserError, match="token-file"):
            PageServer([RunView(run_folder)], host)
        assert not is_loopback(host)


def test_a_server_for_other_machines_answers_to_addresses_and_its_own_names() -> None:
    access = Access("0.0.0.0", TOKEN)
    for name in ("192.0.2.7:8080", "[2001:db8::1]:8080", "localhost", socket.gethostname()):
        assert access.knows_host(name), name
    for name in ("evil.example", "", None):
        assert not access.knows_host(name)


def test_with_a_token_nothing_is_seen_without_it(start: Start) -> None:
    client = start(token=TOKEN)
    for path in ("/", "/data", "/events", "/assets/main.js"):
        status, _, body = client.ask(path)
        assert status == 401
        assert "loss" not in body
    for wrong in (
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \xe9",
    ):
        assert client.ask("/data", Authorization=wrong)[0] == 401
    assert client.ask("/data", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert client.ask("/data", Cookie=f"meshwright={TOKEN}")[0] == 401, "the token itself is no session"
    assert client.ask(f"/data?token={TOKEN}")[0] == 401, "a token in an address ends in logs and histories"


def test_the_login_gives_a_cookie_that_scripts_cannot_read(start: Start) -> None:
    client = start(token=TOKEN)
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert client.ask("/login", "POST", "token=wrong", **form)[0] == 401
    status, headers, _ = client.ask("/login", "POST", urlencode({"token": TOKEN}), **form)
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    pair = cookie.split(";")[0]
    assert client.ask("/data", Cookie=pair)[0] == 200
    assert client.ask("/data", Cookie=pair + "x")[0] == 401
    assert client.ask("/data", Cookie='meshwright="\xe9;;=')[0] == 401


def test_a_login_from_another_page_is_refused(start: Start) -> None:
    client = start(token=TOKEN)
    body = urlencode({"token": TOKEN})
    assert client.ask("/login", "POST", body, Origin="http://evil.example")[0] == 403
    assert client.ask("/login", "POST", body, Origin="null")[0] == 403
    assert client.ask("/login", "POST", body, Origin=f"http://127.0.0.1:{client.port}")[0] == 303


def test_a_huge_form_is_not_read(start: Start) -> None:
    client = start(token=TOKEN)
    head = f"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**12}\r\n\r\n"
    assert b" 413 " in client.raw(head.encode()).splitlines()[0]


def test_wrong_tokens_cost_time(start: Start) -> None:
    client = start(token=TOKEN)
    began = time.perf_counter()
    client.ask("/login", "POST", "token=" + quote("x" * 32))
    assert time.perf_counter() - began > 0.4


def test_nothing_is_logged(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    client = start(token=TOKEN)
    client.ask("/data", Authorization=f"Bearer {TOKEN}")
    client.ask("/login", "POST", urlencode({"token": TOKEN}))
    client.raw(b"\x00\xff nonsense\r\n\r\n")
    assert "".join(capfd.readouterr()) == ""


def test_a_token_file_must_be_private_and_long(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UserError, match="cannot be read"):
        read_token(str(path), "--token-file")
    path.write_text(TOKEN + "\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_token(str(path), "--token-file")
    path.chmod(0o600)
    assert read_token(str(path), "--token-file") == TOKEN
    path.write_text("short")
    with pytest.raises(UserError, match="at least 16") as caught:
        read_token(str(path), "--token-file")
    assert "short" not in str(caught.value).replace(str(path), "")


def test_old_sessions_are_forgotten() -> None:
    access = Access("0.0.0.0", TOKEN)
    first = access.open_session()
    assert access.may_see(None, f"meshwright={first}")
    for _ in range(64):
        last = access.open_session()
    assert not access.may_see(None, f"meshwright={first}")
    assert access.may_see(None, f"other=1; meshwright={last}")


class Stream:
    """One browser's stream of changes."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        self.connection.request("GET", "/events")
        self.answer = self.connection.getresponse()

    def next(self) -> dict | None:
        """The next message; None at the end of the stream."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_a_stream_tells_everything_once_and_then_what_changes(start: Start, run_folder: Path) -> None:
    client = start()
    stream = Stream(client.port)
    first = stream.next()
    assert first is not None
    assert first["all"]["runs"][0]["step"] == 10
    append_steps(run_folder, Strategy.parse("dp=2", 2), 11, 12, began=time.time())
    change: dict = {}
    while change.get("step") != 12:
        told = stream.next()
        assert told is not None
        change = told["changes"]["runs"][0]["changed"]
    assert told["changes"]["runs"][0]["grown"]["loss"][0] in (10, 11), "only what is new is sent"
    stream.close()


def test_streams_are_bounded_and_come_free_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_CLIENTS", 2)
    monkeypatch.setattr("meshwright.observe.web.server.QUIET_S", 0.05)
    client = start()
    streams = [Stream(client.port) for _ in range(2)]
    assert [bool(stream.next()) for stream in streams] == [True, True]
    assert client.ask("/events")[0] == 503
    streams[0].close()
    deadline = time.monotonic() + 10
    while True:
        other = Stream(client.port)
        if other.answer.status == 200:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert other.next() is not None
    other.close()
    streams[1].close()


def test_closing_ends_the_streams(start: Start) -> None:
    client = start()
    stream = Stream(client.port)
    assert stream.next() is not None
    client.server.close()
    assert stream.next() is None
    stream.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", client.port), timeout=1)


def test_mistakes_on_the_command_line_are_told(
    tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for arguments, words in (
        ([tmp_path / "nowhere", "--web"], "is not a folder"),
        ([tmp_path, "--web"], "holds no run"),
        ([run_folder, "--web", "--host", "0.0.0.0"], "needs a --token-file"),
        ([run_folder, "--web", "--port", "70000"], "is not a port"),
        ([run_folder, "--web", "--trace", tmp_path / "q.json"], "--web and --trace are two ways"),
        ([run_folder, "--web", "--once"], "--web and --once are two ways"),
        ([run_folder, "--once", "--trace", tmp_path / "q.json"], "--trace and --once are two ways"),
        ([run_folder, "--web", "--steps", "3:5"], "say --trace FILE, too"),
        ([run_folder, "--once", "--port", "0"], "--port says how the page is served; say --web, too"),
        ([run_folder, "--once", "--token-file", token], "--token-file says how"),
        ([run_folder, "--once", "--host", "127.0.0.1"], "--host says how"),
        ([run_folder, "--web", "--host", "192.0.2.1", "--token-file", token], "cannot listen on 192.0.2.1"),
    ):
        assert main(["watch", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(run_folder), "--out", str(tmp_path / "no" / "where.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
