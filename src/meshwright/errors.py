"""What goes wrong because of something the user can change.

A `UserError` is shown as its message alone, without a traceback, and ends the program with its `exit_code`, 2. Its
message says what was found, what is allowed and what to do. Anything else is our own error and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something that the user gave is wrong; the message says what to change."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or impossible."""


class DataError(UserError):
    """The corpus, its tokenizer or its packed form cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint or a run folder cannot be used as it is."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause such as " (did you mean 'steps'?)" for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
