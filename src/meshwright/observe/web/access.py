"""Who may see the page: which names it answers to, and the token that other machines must have."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie

from meshwright.address import is_loopback

COOKIE = "meshwright"
MOST_SESSIONS = 64


class Access:
    """Decides who gets an answer."""

    def __init__(self, host: str, token: str | None) -> None:
        self._loopback = is_loopback(host)
        self._token = token
        # A page elsewhere can make a browser ask for a name that leads here; it cannot make it ask for another name.
        self._names = {"localhost"} if self._loopback else {"localhost", host, socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower() for name in self._names}
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def needs_token(self) -> bool:
        """Whether one must be sent."""
        return self._token is not None

    def knows_host(self, header: str | None) -> bool:
        """Whether a Host header names this server: by an address, or by a name that is known to be its own."""
        name = _name_of(header or "")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._loopback

    def same_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether a form was sent from this page; browsers say so, other programs say nothing."""
        return origin is None or (host is not None and origin.lower() == f"http://{host.lower()}")

    def is_token(self, text: str) -> bool:
        """Whether it is the token; takes as long for a wrong one."""
        return self._token is not None and hmac.compare_digest(text.encode(), self._token.encode())

    def may_see(self, authorization: str | None, cookie: str | None) -> bool:
        """Whether a request with these headers gets an answer."""
        if self._token is None:
            return True
        kind, _, text = (authorization or "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(text.strip()):
            return True
        return self._is_session(cookie or "")

    def open_session(self) -> str:
        """A value for a cookie that stands for the token from now on; the oldest of many are forgotten."""
        made = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[made] = None
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return made

    def _is_session(self, header: str) -> bool:
        try:
            held = SimpleCookie(header).get(COOKIE)
        except CookieError:
            return False
        if held is None:
            return False
        with self._lock:
            known = list(self._sessions)
        # Compared with each, so that the time tells nothing.
        return sum(hmac.compare_digest(held.value.encode(), one.encode()) for one in known) > 0


def _name_of(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
