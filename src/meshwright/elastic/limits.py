"""How long a rank may stay in a phase before it counts as stuck: learned from the run, without torch.

Before anything is known the limit is long, since first steps compile, allocate and connect. Once a rank has been
through a phase often enough, the limit is a multiple of the longest it ever took, and some seconds. So a model whose
steps take minutes is not mistaken for a stuck one, and one whose steps take milliseconds is found soon.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.pulse import Beat

ONCE = frozenset({"start", "restore", "end"})
"""Phases of which a rank sees one: there is nothing to learn from."""

STEPS_TO_LEARN = 3
"""How often a rank must have been through a phase of every step before that says something; the first compile."""

RARE = frozenset({"evaluate", "stage", "write", "commit", "retention"})
"""Phases that come now and then: once is enough to learn from."""


@dataclass(frozen=True)
class Limits:
    """The rule, from the settings."""

    first_s: float = 480.0
    factor: float = 5.0
    floor_s: float = 60.0

    def of(self, beat: Beat) -> float:
        """Seconds that a rank may stay in the phase it is in."""
        return self.learned(beat) or self.first_s

    def learned(self, beat: Beat) -> float | None:
        """The tight limit of that phase; None as long as too little is known."""
        phase = beat.phase
        needed = 1 if phase in RARE else STEPS_TO_LEARN
        if phase in ONCE or beat.ended.get(phase, 0) < needed:
            return None
        return self.factor * beat.longest[phase] + self.floor_s

    def in_words(self, beat: Beat) -> str:
        """Where that limit comes from."""
        learned = self.learned(beat)
        if learned is None:
            return f"{self.first_s:g} s (elastic.first_timeout_s: it has seldom been in {beat.phase} before)"
        return (
            f"{learned:.3g} s (elastic.hang_factor={self.factor:g} x the longest {beat.phase} so far, "
            f"{beat.longest[beat.phase]:.3g} s, + elastic.hang_floor_s={self.floor_s:g})"
        )
