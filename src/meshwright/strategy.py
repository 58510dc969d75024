"""Strategy: what is split and how many ways. Parse, format, check; the only place that knows what is legal.

The short form is what people read and type: `dp=8 zero=3 tp=2`. Left-out degrees are filled in.

    world     = dp x tp
    dp        = replicate x shard: copies of the model, and ranks that share one copy
    zero      = 0 nothing is sharded (shard=1), 1 optimizer state, 2 gradients too, 3 parameters too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshwright.errors import ConfigError, nearest

AUTO = "auto"


@dataclass(frozen=True)
class Strategy:
    """How the work of a step is split. `parse` fills it in consistently; `check` says what a model cannot take."""

    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that share the state of one copy."""
    zero: int = 0
    """What is sharded over them: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""

    @property
    def dp(self) -> int:
        """Ranks that work on different samples."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """How many processes it takes."""
        return self.dp

    @classmethod
    def parse(cls, text: str, world: int) -> Strategy:
        """The strategy of a short form for that many processes; `auto` and left-out degrees are filled in."""
        words = _words(text)
        given = {key: _degree(text, key, value) for key, value in words.items() if value != AUTO}
        zero = given.get("zero", 0)
        if zero > 3:
            raise _refuse(text, f"zero={zero} is not a stage; stages are 0, 1, 2 and 3")
        dp = given.get("dp", world)
        if zero == 0:
            if given.get("shard", 1) > 1:
                raise _refuse(text, f"shard={given['shard']} needs something to shard; add zero=1, 2 or 3")
            replicate, shard = given.get("replicate", dp), 1
        elif "replicate" in given:
            replicate, shard = given["replicate"], given.get("shard", dp // max(1, given["replicate"]))
        else:
            shard = given.get("shard", dp)
            replicate = dp // max(1, shard)
        strategy = cls(replicate, shard, zero)
        if "dp" in given and strategy.dp != dp:
            raise _refuse(text, f"dp={dp} is not replicate={replicate} x shard={shard}; leave one of the three out")
        if strategy.world != world:
            raise _refuse(
                text,
                f"it needs {strategy.world} processes and there are {world}; "
                f"start with --nproc {strategy.world} or set parallel.strategy=auto",
            )
        return strategy

    @classmethod
    def processes(cls, text: str) -> int | None:
        """How many processes a short form asks for; None when it leaves that open."""
        words = {key: int(value) for key, value in _words(text).items() if value.isdecimal()}
        if "dp" in words:
            return words["dp"]
        if "replicate" in words and ("shard" in words or not words.get("zero")):
            return words["replicate"] * words.get("shard", 1)
        return None

    def __str__(self) -> str:
        parts = [f"dp={self.dp}"]
        if self.zero:
            parts.append(f"zero={self.zero}")
            if self.replicate > 1:
                parts.append(f"replicate={self.replicate}")
        return " ".join(parts)

    def micro_steps(self, batch: int, micro_batch: int | None) -> int:
        """Forward passes per optimizer step on each rank for a global batch; refuses one that does not divide."""
        unit = self.dp * (micro_batch or 1)
        if batch % unit:
            below, above = batch // unit * unit, -(-batch // unit) * unit
            legal = f"{below} or {above}" if below else str(above)
            detail = f"dp={self.dp}" + (f" x train.micro_batch={micro_batch}" if micro_batch else "")
            raise ConfigError(f"a global batch of {batch} is not divisible by {unit} ({detail}); use {legal}")
        return batch // unit if micro_batch else 1


KEYS = ("dp", *(field.name for field in fields(Strategy)))


def _words(text: str) -> Mapping[str, str]:
    """Keys and values of a short form, in order."""
    words: dict[str, str] = {}
    for word in text.split():
        key, _, value = word.partition("=")
        if word == AUTO:
            continue
        if key not in KEYS:
            known = ", ".join(f"{name}=N" for name in KEYS)
            raise _refuse(text, f"unknown key '{key}'{nearest(key, KEYS)}; write auto, or {known}")
        if key in words:
            raise _refuse(text, f"{key} is given twice")
        words[key] = value
    return words


def _degree(text: str, key: str, value: str) -> int:
    lowest = 0 if key == "zero" else 1
    if not value.isdecimal() or int(value) < lowest:
        raise _refuse(text, f"{key} needs a whole number from {lowest}, not '{value}'")
    return int(value)


def _refuse(text: str, reason: str) -> ConfigError:
    return ConfigError(f"parallel.strategy='{text}': {reason}")
