"""The server of the page: loopback unless told otherwise, read-only, standard library.

/           the page            /data     the runs as JSON
/assets/*   its files, by name  /events   what changes, as server-sent events
/login      takes the token once and gives a cookie, where a token is asked for
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.address import is_loopback
from meshwright.errors import UserError
from meshwright.observe.bounded_server import BoundedServer
from meshwright.observe.view import RunView
from meshwright.observe.web.access import COOKIE, Access
from meshwright.observe.web.assets import ICON, LOGIN, PAGE, SCRIPTS, STYLE, asset, content_type
from meshwright.observe.web.hub import Hub, TooManyClients

MOST_CONNECTIONS = 64
QUIET_S = 15.0
"""After so long without news a stream gets a sign of life; it also finds browsers that have gone."""
READ_S = 10.0
"""How long a browser may take to send a request or to take an answer."""
LONGEST_FORM = 4096
WRONG_TOKEN_S = 0.5
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": browsers would then hide from the login where its form was sent from.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(BoundedServer):
    """Serves the page of some runs until closed."""

    def __init__(
        self, runs: Sequence[RunView], host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        if not is_loopback(host) and token is None:
            raise UserError(
                f"--host {host} can be reached by other machines and needs a --token-file; "
                "or leave --host out and come through ssh -L"
            )
        self.access = Access(host, token)
        try:
            super().__init__((host, port), Handler, MOST_CONNECTIONS)
        except OSError as error:
            raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
        self.hub = Hub(runs)
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def close(self) -> None:
        """End the streams and give the port back."""
        self.closing.set()
        self.hub.close()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one browser."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "meshwright"
    sys_version = ""
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: neither who looks nor what was sent."""

    def do_GET(self) -> None:
        """Answer with a page, a file, the data or the stream of changes."""
        path = urlsplit(self.path).path
        if not self._knows_host():
            return
        access = self.server.access
        if not access.may_see(self.headers.get("Authorization"), self.headers.get("Cookie")):
            if path == "/":
                self._send(HTTPStatus.UNAUTHORIZED, asset(LOGIN), content_type(LOGIN))
            elif path in (f"/assets/{STYLE}", f"/assets/{ICON}"):
                self._send_asset(path.removeprefix("/assets/"))
            else:
                self._refuse(HTTPStatus.UNAUTHORIZED, "a token is needed", {"WWW-Authenticate": "Bearer"})
            return
        name = path.removeprefix("/assets/")
        if path == "/":
            self._send_asset(PAGE)
        elif path.startswith("/assets/") and name in (*SCRIPTS, STYLE, ICON):
            self._send_asset(name)
        elif path == "/data":
            self._send(HTTPStatus.OK, self.server.hub.data(), "application/json")
        elif path == "/events":
            self._stream()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Take the token from the login form."""
        if not self._knows_host():
            return
        access = self.server.access
        if urlsplit(self.path).path != "/login" or not access.needs_token:
            self._not_allowed()
            return
        length = self.headers.get("Content-Length") or ""
        if not access.same_origin(self.headers.get("Origin"), self.headers.get("Host")):
            self._refuse(HTTPStatus.FORBIDDEN, "the form was sent from another page")
        elif not length.isdecimal() or int(length) > LONGEST_FORM:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the form is too long")
        else:
            form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"))
            if access.is_token(form.get("token", [""])[0].strip()):
                cookie = f"{COOKIE}={access.open_session()}; HttpOnly; SameSite=Strict; Path=/"
                self._send(HTTPStatus.SEE_OTHER, "", "text/plain", {"Location": "/", "Set-Cookie": cookie})
            else:
                # Guessing is slow; the thread waits, others are answered.
                self.server.closing.wait(WRONG_TOKEN_S)
                self._send(HTTPStatus.UNAUTHORIZED, asset(LOGIN), content_type(LOGIN))

    def _not_allowed(self) -> None:
        if self._knows_host():
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only read", {"Allow": "GET, HEAD"})

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _knows_host(self) -> bool:
        if self.server.access.knows_host(self.headers.get("Host")):
            return True
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server does not answer to that name")
        return False

    def _refuse(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        # What else the browser has sent is not read: the connection ends.
        self.close_connection = True
        self._send(status, text + "\n", "text/plain; charset=utf-8", {"Connection": "close", **(headers or {})})

    def _send_asset(self, name: str) -> None:
        self._send(HTTPStatus.OK, asset(name), content_type(name))

    def _send(self, status: HTTPStatus, text: str, kind: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {}), "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self) -> None:
        """Server-sent events until the browser goes or the server ends."""
        try:
            client = self.server.hub.join()
        except TooManyClients:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open", {"Retry-After": "10"})
            return
        self.close_connection = True
        try:
            self.send_response(HTTPStatus.OK)
            for name, value in {**HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            while self.command != "HEAD":
                try:
                    message = client.messages.get(timeout=QUIET_S)
                except queue.Empty:
                    self.wfile.write(b": still here\n\n")
                    continue
                if message is None:
                    return
                # JSON has no line breaks of its own.
                self.wfile.write(f"data: {message}\n\n".encode())
        except OSError:
            return
        finally:
            self.server.hub.leave(client)


def serve(runs: Sequence[RunView], host: str, port: int, token: str | None) -> None:
    """Serve the page until interrupted; says where it is."""
    server = PageServer(runs, host, port, token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        print(f"the page is at {server.url} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print("the page is closed", flush=True)
    finally:
        server.close()
