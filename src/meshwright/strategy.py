"""Strategy: what is split and how many ways. Parse, format, check; the only place that knows what is legal.

The short form is what people read and type: `dp=4`. `auto` takes every process as a replica that works on its own share
of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshwright.errors import ConfigError, nearest


@dataclass(frozen=True)
class Strategy:
    """How the work of a step is split."""

    dp: int = 1
    """Replicas of the model, each with its share of the batch."""

    @classmethod
    def parse(cls, text: str, world: int) -> Strategy:
        """The strategy of a short form for that many processes; `auto` and left-out degrees are filled in."""
        degrees: dict[str, int] = {}
        known = [field.name for field in fields(cls)]
        for word in text.split():
            key, _, value = word.partition("=")
            if word == "auto" or value == "auto":
                continue
            if key not in known:
                raise ConfigError(
                    f"parallel.strategy={text!r}: unknown key '{key}'{nearest(key, known)}; "
                    f"write auto or {', '.join(f'{name}=N' for name in known)}"
                )
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"parallel.strategy={text!r}: {key} needs a whole number from 1, not '{value}'")
            degrees[key] = int(value)
        strategy = cls(**{"dp": world, **degrees})
        if strategy.world != world:
            raise ConfigError(
                f"parallel.strategy={text!r} needs {strategy.world} processes and there are {world}; "
                f"start with --nproc {strategy.world} or set parallel.strategy=auto"
            )
        return strategy

    @classmethod
    def processes(cls, text: str) -> int | None:
        """How many processes a short form asks for; None when it leaves that open."""
        found = [word.removeprefix("dp=") for word in text.split() if word.startswith("dp=")]
        return int(found[0]) if found and found[0].isdecimal() else None

    @property
    def world(self) -> int:
        """How many processes it takes."""
        return self.dp

    def __str__(self) -> str:
        return f"dp={self.dp}"

    def micro_steps(self, batch: int, micro_batch: int | None) -> int:
        """Forward passes per optimizer step on each rank for a global batch; refuses one that does not divide."""
        unit = self.dp * (micro_batch or 1)
        if batch % unit:
            below, above = batch // unit * unit, -(-batch // unit) * unit
            legal = f"{below} or {above}" if below else str(above)
            detail = f"{self.dp} replicas" + (f" x train.micro_batch={micro_batch}" if micro_batch else "")
            raise ConfigError(f"a global batch of {batch} is not divisible by {unit} ({detail}); use {legal}")
        return batch // unit if micro_batch else 1
