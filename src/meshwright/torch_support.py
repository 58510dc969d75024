"""Which PyTorch is supported, checked at start without importing it, and how a command imports it at least cost."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from meshwright.errors import UserError

OLDEST, BEFORE = (2, 11), (2, 14)
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BEFORE[0]}.{BEFORE[1]}"


def require_torch() -> None:
    """Raise a UserError unless a supported PyTorch is installed."""
    advice = f"install one: pip install 'torch{RANGE}'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UserError(f"this needs PyTorch and none is installed; {advice}") from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BEFORE:
        raise UserError(f"PyTorch {version} is outside of the supported range torch{RANGE}; {advice}")


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Imports of a process that is ours alone: Python does not look through them for garbage, not even at its end.

    Torch and what it brings are half a million objects. Looking through them took a third of the seconds that a command
    needs to start and end, and much of what each of its forked ranks needs to begin.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
