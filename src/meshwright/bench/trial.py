"""What one process measures of one contender, and what it found; both as JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig
from meshwright.models.spec import ModelSpec
from meshwright.training.job import model_spec


@dataclass(frozen=True)
class Trial:
    """One contender's training: the settings of a run, of which peers take what they have."""

    contender: str
    """Its name; that of a variant has a second word."""
    config: RunConfig
    steps: int
    """That are timed."""
    warm_up: int
    """Before them, the first of which compiles."""
    compile: str = "auto"
    """Whether peers compile: on, off, or auto, on a GPU."""

    @property
    def total(self) -> int:
        return self.warm_up + self.steps

    @property
    def micro_batch(self) -> int:
        return self.config.train.global_batch

    @property
    def length(self) -> int:
        return self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batch * self.length

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    def compiles(self, device_type: str) -> bool:
        """Whether a peer compiles there."""
        return self.compile == "on" or (self.compile == "auto" and device_type != "cpu")

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """The random tokens of every step, (samples, tokens + 1): the same ones for all contenders."""
        for number in range(self.total):
            draw = np.random.default_rng((self.config.run.seed, number))
            yield draw.integers(self.spec.vocab_size, size=(self.micro_batch, self.length + 1))

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Trial:
        return cls(**{**facts, "config": RunConfig.model_validate(facts["config"])})


@dataclass(frozen=True)
class Facts:
    """What a contender tells about itself."""

    parameters: int
    notes: tuple[str, ...] = ()
    """What differs from what its users run."""


@dataclass(frozen=True)
class Found:
    """What one process measured, or why it did not."""

    contender: str
    micro_batch: int
    step_ms: tuple[float, ...] = ()
    """Of the timed steps."""
    losses: tuple[float, ...] = ()
    """Of all steps."""
    peak_bytes: float = 0.0
    first_step_s: float = 0.0
    """From the start of the process to the end of its first step."""
    parameters: int = 0
    notes: tuple[str, ...] = ()
    device: str = ""
    """`cpu`, or the name that the driver gives."""
    device_mib: float = 0.0
    torch: str = ""
    refusal: str | None = None
    """Why it cannot train this model here."""
    failure: str | None = None
    """What went wrong."""
    warm: bool = field(default=False, compare=False)
    """Whether compiled kernels of an earlier process were there."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Found:
        tuples = {name: tuple(facts[name]) for name in ("step_ms", "losses", "notes")}
        return cls(**{**facts, **tuples})
