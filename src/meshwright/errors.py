"""What goes wrong because of something the user can change.

A `UserError` is shown as its message alone, without a traceback, and ends the program with its `exit_code`, 2. Its
message says what was found, what is allowed and what to do. Anything else is our own error and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """How the program ends; a scheduler can tell from it whether starting again makes sense."""

    DONE = 0
    """The run reached its end."""
    FAILED = 1
    """An error of ours, or of the machine; the traceback says which."""
    BAD_INPUT = 2
    """Something that the user gave is wrong; starting again changes nothing."""
    DIVERGED = 3
    """The numbers of the training are no longer numbers, and what was allowed against it did not help."""
    DAMAGED = 4
    """No checkpoint of the run can be trusted."""
    NO_PROGRESS = 5
    """The same step failed again and again; starting again changes nothing."""
    PARTITIONED = 6
    """This machine cannot reach enough of the others."""
    OUT_OF_MEMORY = 7
    """A rank needs more memory than there is."""
    LOCKED = 8
    """Another process trains in the run folder."""
    QUARANTINED = 9
    """This machine was lost too often in a short time, and takes no further part in the run."""
    PREEMPTED = 75
    """Asked to stop, saved: the same command goes on from there."""


class UserError(ValueError):
    """Something that the user gave is wrong; the message says what to change."""

    exit_code: int = ExitCode.BAD_INPUT


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or impossible."""


class DataError(UserError):
    """The corpus, its tokenizer or its packed form cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint or a run folder cannot be used as it is."""


class StoreError(UserError):
    """An object store does not answer, or not to us. It is no CheckpointError: nothing is known to be damaged."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause such as " (did you mean 'steps'?)" for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
