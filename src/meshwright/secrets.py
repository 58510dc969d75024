"""Secrets: what they are, and texts without them.

A secret is what lets someone in: the value of an environment variable whose name says so (WANDB_API_KEY, HF_TOKEN),
the login in a URL (s3://key:secret@bucket), the content of a token file. Texts lose them where they leave the program:
on the console, in events, in files of the run folder, on their way to a service. Values are known by what holds them,
not by what they look like, so that a text is changed only where a secret stands; by their form they are only refused.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote, unquote

from meshwright.errors import ConfigError

HIDDEN = "***"
"""What stands in the place of a secret."""
SHORTEST = 8
"""Shorter values are no secret that can be told from ordinary words; in a URL they are found by their place."""
LEAST_CHARACTERS = 16
"""Of a token."""
_SHORTEST_NAME = 16
"""A login's name is hidden from this length on: such names are keys of stores, shorter ones are people."""

_WORDS = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY"}
_ENDINGS = ("API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "ACCOUNT_KEY", "CONNECTION_STRING", "SAS")
_PLACES = {"FILE", "PATH", "DIR"}
"""The last word of variables that say where a secret lies, which is none."""

# A login may hold a slash, as keys of S3 do; a port, digits and then a slash or the end, begins none.
_LOGIN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)"
    r"(?P<name>[^\s/@:?#'\"]*)(?P<password>:(?!\d{1,5}(?:[/?#\s]|$))[^\s@'\"]*(?:@[^\s@/'\"]*)*)?@"
)
_PARAMETER = re.compile(
    r"(?P<key>[?&][\w.-]*(?:token|secret|signature|password|api_?key|credential|sig)=)(?P<value>[^&\s'\"#]+)",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\b(?P<kind>Bearer|Basic)\s+(?P<value>[A-Za-z0-9._~+/=-]{8,})")

_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-(?:[a-z0-9]+-){0,2}\w{20,}|"
    r"xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""How services write their keys and tokens."""
# A token alone, or one to enter with: a pad_token is text of a model. A secret named by a variable or a file is none.
_ASSIGNED = re.compile(
    r"(?:password|passwd|passphrase|secret|(?:api|access|account)_?key|(?<!\w)pwd|"
    r"(?:(?<![\w.-])|-D|--|(?:access|auth|api|bearer|session|refresh|security|hf)[_-]?)token)"
    r"(?:=|\s+=\s+|[\"']\s*:\s*)[\"']?"
    r"(?!(?:true|false|none|null|yes|no|on|off)\b|(?:~|\.{0,2})/[\w.-]+/)[^\s\"'&;,<>$*{(]",
    re.IGNORECASE,
)


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of that name holds a secret."""
    words = name.upper().split("_")
    if words[-1] in _PLACES:
        return False
    return not _WORDS.isdisjoint(words) or name.upper().endswith(_ENDINGS)


def without_login(text: str) -> str:
    """A text whose URLs have lost their logins: they name the same place, for whoever may enter it otherwise."""
    return _PARAMETER.sub(rf"\g<key>{HIDDEN}", _LOGIN.sub(r"\g<scheme>", text))


def holds_secret(text: str) -> bool:
    """Whether a text has a login, a key or a token in it, by its place or its form, or one of this process's own."""
    formed = _FORMS.search(text) is not None or _ASSIGNED.search(text) is not None
    return formed or Secrets.known().redact(text) != text


def login_of(url: str) -> tuple[str, str] | None:
    """Name and password of a URL, as they are meant; None where it has none."""
    found = _LOGIN.match(url)
    if found is None:
        return None
    return unquote(found["name"]), unquote((found["password"] or ":")[1:])


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a tree of tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from texts_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)


def public(value: Any) -> Any:
    """A tree of tables and lists whose URLs have lost their logins."""
    if isinstance(value, str):
        return without_login(value)
    if isinstance(value, Mapping):
        return {key: public(entry) for key, entry in value.items()}
    return [public(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Secrets:
    """The secrets that a process knows of."""

    values: frozenset[str] = frozenset()

    @classmethod
    def known(
        cls, settings: Any = (), contents: Iterable[str] = (), environment: Mapping[str, str] | None = None
    ) -> Secrets:
        """Those of the environment, of logins in a tree of settings, and `contents` of files that hold one."""
        environment = os.environ if environment is None else environment
        found = {value for name, value in environment.items() if is_secret_variable(name)}
        found.update(contents)
        for text in (*environment.values(), *texts_in(settings)):
            for login in _LOGIN.finditer(text):
                found |= {(login["password"] or ":")[1:], *([login["name"]] * (len(login["name"]) >= _SHORTEST_NAME))}
            found.update(parameter["value"] for parameter in _PARAMETER.finditer(text))
        found |= {unquote(value) for value in found} | {quote(value, safe="") for value in found}
        return cls(frozenset(value.strip() for value in found if len(value.strip()) >= SHORTEST))

    def __or__(self, other: Secrets) -> Secrets:
        return Secrets(self.values | other.values)

    def __repr__(self) -> str:
        return f"Secrets({len(self.values)})"

    def redact(self, text: str) -> str:
        """The text without them, and without logins and keys that stand where URLs and headers have theirs."""
        if self._pattern is not None:
            text = self._pattern.sub(HIDDEN, text)
        text = _LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text) if "://" in text else text
        text = _PARAMETER.sub(rf"\g<key>{HIDDEN}", text) if "=" in text else text
        return _HEADER.sub(rf"\g<kind> {HIDDEN}", text)

    def redact_tree(self, value: Any) -> Any:
        """A tree of tables and lists, its texts without secrets."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, Mapping):
            return {key: self.redact_tree(entry) for key, entry in value.items()}
        return [self.redact_tree(entry) for entry in value] if isinstance(value, list | tuple) else value

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        # The longest first: one may be the beginning of another.
        values = sorted(self.values, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, values))) if values else None


class GuardedStream:
    """A text stream that secrets do not get through; otherwise the stream itself."""

    def __init__(self, stream: TextIO, secrets: Secrets) -> None:
        self.stream, self.secrets = stream, secrets

    def write(self, text: str) -> int:
        """Write the text without secrets; says, as streams do, that all of it was taken."""
        self.stream.write(self.secrets.redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded_output(secrets: Secrets) -> Iterator[None]:
    """The context in which nothing that Python prints holds these secrets, nor those of a context around it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_guarded(stream, secrets) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guarded(stream: Any, secrets: Secrets) -> Any:
    if stream is None:  # A process without a console.
        return None
    if isinstance(stream, GuardedStream):
        return GuardedStream(stream.stream, stream.secrets | secrets)
    return GuardedStream(stream, secrets)


def read_token(path: str, setting: str) -> str:
    """The token in a file that nobody else may read; a ConfigError that names the setting where it is none, or easily
    guessed."""
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise ConfigError(f"{setting}={path} can be read by others; chmod 600 {path}")
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{setting}={path} cannot be read: {reason}") from None
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{setting}={path} must hold one token of at least {LEAST_CHARACTERS} printable characters; make one with "
            'python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return token
