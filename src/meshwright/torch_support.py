"""Which PyTorch is supported. Checked at start without importing it, and told in words what to install."""

from __future__ import annotations

import re
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
