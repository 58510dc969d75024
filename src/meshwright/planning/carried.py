"""The settings of a run that a plan is not asked about, such as the learning rate, on their way to --emit. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.config import RunConfig
from meshwright.planning.question import Question

DEFAULTS = "Optimizer, learning rate, schedule and clipping are Meshwright's defaults: set your own."

SETTINGS = tuple(
    f"train.{name}"
    for name in (
        "optimizer",
        "lr",
        "min_lr",
        "schedule",
        "warmup_steps",
        "weight_decay",
        "beta1",
        "beta2",
        "eps",
        "grad_clip",
    )
)
"""What that sentence is about."""


@dataclass(frozen=True)
class Carried:
    """What the file says that was planned for; our defaults where there is none."""

    config: RunConfig = field(default_factory=RunConfig)
    source: str = ""
    """The file; empty for our defaults."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Megatron-LM's flags as they stand in it."""
    chosen: frozenset[str] = frozenset()
    """Settings that it names; the others are the trainer's defaults, its own or ours."""

    @property
    def told(self) -> str:
        """Where the settings come from, in a sentence."""
        if not self.source:
            return DEFAULTS
        return f"Optimizer, learning rate, schedule and clipping are those of {self.source!r}."

    @property
    def defaults(self) -> list[str]:
        """Those of them that nobody has chosen."""
        return [name for name in SETTINGS if name not in self.chosen]

    def steps(self, question: Question, tokens: float | None) -> int:
        """How long the run is: as many steps as the plan's tokens take, where it has a number of them."""
        if tokens is None:
            return self.config.train.steps
        return max(1, round(tokens / (question.global_batch * question.sequence_length)))

    @property
    def has_data(self) -> bool:
        """Whether it names the data."""
        return self.config.data.path is not None or bool(self.config.data.mix)
