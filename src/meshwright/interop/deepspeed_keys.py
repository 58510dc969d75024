"""The keys of a ds_config.json that have a value, by their full names. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.interop.deepspeed_rules import ALIASES, OLDER, RULES
from meshwright.interop.rules import fitting
from meshwright.interop.translation import Reading

DIALECT = "deepspeed"
LEFT_TO_US = "auto"
"""The value with which Hugging Face's files leave a key to the trainer."""
BETAS = "optimizer.params.betas"
BY_KEY = {rule.key: rule for rule in RULES}


def read_json(file: Path) -> dict[str, Any]:
    """The content of a file; JSON, in which no key stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"{file} ({DIALECT}): '{twice[0]}' is given twice; leave one of them out")
        return dict(pairs)

    try:
        content = json.loads(file.read_text("utf-8"), object_pairs_hook=once)
    except FileNotFoundError:
        raise ConfigError(f"--deepspeed={file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--deepspeed={file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        # A whole number of thousands of digits is refused by Python itself.
        raise ConfigError(f"--deepspeed={file} is not JSON: {error}; comments and trailing commas are not") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--deepspeed={file} holds a {type(content).__name__}; a ds_config is one JSON object")
    return content


def known_keys(reading: Reading, content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that act, with their values; what is unknown, or not of its kind, is refused."""
    found: dict[str, Any] = {}
    off = _off(content)
    for key, value in _leaves(reading, content, ""):
        reading.given.add(key)
        section = key.partition(".")[0]
        if value == LEFT_TO_US:
            reading.leave(key, value, "left to our own setting")
            reading.left_to_us |= {key} if key != BETAS else {f"optimizer.params.beta{number}" for number in (1, 2)}
        elif section in off and not key.endswith(".enabled"):
            reading.leave(key, value, off[section])
        else:
            try:
                found[key] = fitting(BY_KEY[key].kind, value)
            except ValueError as error:
                reading.refuse(key, f"= {value!r} {error}")
    return found


def _off(content: Mapping[str, Any]) -> dict[str, str]:
    """Sections that do nothing, and why: DeepSpeed has them off unless they are enabled."""
    found = {}
    for name, table in content.items():
        section = ALIASES.get(name, name)
        if f"{section}.enabled" not in BY_KEY or not isinstance(table, dict):
            continue
        if "enabled" not in table:
            found[section] = f"{section} is off, as it is by default: there is no enabled"
        elif table["enabled"] is False:
            found[section] = f"{section} is off"
    return found


def _leaves(reading: Reading, table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys of a table and of those below it, as far as the rules go."""
    for name, value in _once(reading, table, prefix).items():
        key = ALIASES.get(f"{prefix}{name}", f"{prefix}{name}")
        below = [known for known in BY_KEY if known.startswith(f"{key}.")]
        if below and isinstance(value, dict):
            yield from _leaves(reading, value, f"{key}.")
        elif key in BY_KEY:
            yield key, value
        elif below:
            reading.refuse(key, f"= {value!r} must be a table, with {', '.join(_names(f'{key}.'))}")
        else:
            siblings = _names(prefix)
            elsewhere = [known for known in BY_KEY if known.split(".")[-1] == name]
            hint = nearest(name, siblings) or (f" (did you mean '{elsewhere[0]}'?)" if elsewhere else "")
            reading.refuse(key, f"is no key that is known here{hint}; leave it out, or correct it")


def _once(reading: Reading, table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A table without what it says a second time under another name; names that disagree are refused."""
    kept: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in table.items():
        full = f"{prefix}{name}"
        first = names.setdefault(OLDER.get(full, ALIASES.get(full, full)), name)
        if first == name:
            kept[name] = value
        elif table[first] == value:
            reading.leave(full, value, f"the same as {prefix}{first}")
        else:
            reading.refuse(f"{prefix}{first}", f"and {full} are two names of one key and differ; leave one of them out")
    return kept


def _names(prefix: str) -> list[str]:
    """The names of keys and tables directly below a prefix."""
    rest = (key[len(prefix) :] for key in BY_KEY if key.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in rest))
