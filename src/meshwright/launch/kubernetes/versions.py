"""Which release of Kubernetes has which field of a Job: what is written is what the cluster's release knows.

A field counts from the release in which it is on by default (beta), never from its alpha.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from meshwright.errors import ConfigError

OLDEST, NEWEST = (1, 25), (1, 37)
USUAL = "1.31"

_SINCE = {
    "podFailurePolicy": (1, 26),
    "backoffLimitPerIndex": (1, 29),
    "podReplacementPolicy": (1, 29),
    "successPolicy": (1, 31),
}


@dataclass(frozen=True, order=True)
class Release:
    """A release of Kubernetes."""

    number: tuple[int, int]

    @classmethod
    def parse(cls, option: str, word: str) -> Self:
        """From 1.31, v1.31 or v1.31.4."""
        found = re.fullmatch(r"v?(\d+)\.(\d+)(\.\d+)?", word)
        number = (int(found[1]), int(found[2])) if found else None
        if number is None or not OLDEST <= number <= NEWEST:
            newest = f"{NEWEST[0]}.{NEWEST[1]}"
            known = f"{option} {word}: releases from {OLDEST[0]}.{OLDEST[1]} to {newest} are known"
            is_newer = number is not None and number > NEWEST
            raise ConfigError(known + (f"; say {newest}, whose fields newer ones take as well" if is_newer else ""))
        return cls(number)

    def has(self, field: str) -> bool:
        """Whether a Job of this release has a field."""
        return self.number >= _SINCE[field]

    def __str__(self) -> str:
        return f"{self.number[0]}.{self.number[1]}"
