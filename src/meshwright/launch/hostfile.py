"""Hosts by name, and how many ranks each has room for: a file as DeepSpeed and MPI have it, or a list. No torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from meshwright.errors import ConfigError

# As ssh takes them, never something that it would take for an option; IPv6 stands in brackets where slots follow.
_HOST = re.compile(
    r"(?P<user>[A-Za-z0-9_.][\w.-]*@)?"
    r"(?:(?P<bare>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)|"
    r"(?:(?P<name>[A-Za-z0-9_][\w.-]*)|\[(?P<inner>[0-9A-Fa-f:.]+)\])(?::(?P<slots>[0-9]+))?)"
)


@dataclass(frozen=True)
class Host:
    """A machine."""

    name: str
    """As ssh takes it."""
    slots: int | None = None
    """Ranks that it has room for; None where nobody said."""

    @property
    def address(self) -> str:
        """Its name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file, a line for each: `host slots=8`, `host:8` or `host`; `#` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_host(words, f"{path}, line {number}"))
    return _checked(found, f"--hostfile {path}")


def parse_hosts(text: str) -> list[Host]:
    """The hosts of a list: a,b or a:8,b:8."""
    return _checked([_host([word], "--hosts") for word in text.split(",") if word.strip()], "--hosts")


def _host(words: list[str], where: str) -> Host:
    found = _HOST.fullmatch(words[0].strip())
    six = found and (found["bare"] or found["inner"])
    if found is None or (six and not _is_six(six)):
        raise ConfigError(f"{where}: '{words[0].strip()}' is not the name of a host, or HOST:SLOTS with a number")
    # Brackets are for this list; ssh takes none.
    name = (found["user"] or "") + (six or found["name"])
    slots = int(found["slots"]) if found["slots"] else None
    for word in words[1:]:
        key, given, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not given or not value.isdecimal():
            raise ConfigError(f"{where}: '{word}' is not slots=N")
        if key == "slots":
            slots = int(value)
    if slots == 0:
        raise ConfigError(f"{where}: {name} has no slots; leave it out")
    return Host(name, slots)


def _is_six(text: str) -> bool:
    with suppress(ValueError):
        IPv6Address(text)
        return True
    return False


def _checked(found: list[Host], where: str) -> list[Host]:
    if not found:
        raise ConfigError(f"{where} names no host")
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where} names {twice} twice")
    return found
