"""Shared by the unit tests: properties are not timed, since that would mostly measure the machine's other work."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
