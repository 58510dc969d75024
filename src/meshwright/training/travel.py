"""How a run's gradients travel: the [comm] section, checked against the strategy and the precision. No torch."""

from __future__ import annotations

from meshwright.comm.compression import Compression
from meshwright.comm.travel import Travel
from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy


def travel_of(config: RunConfig, strategy: Strategy) -> Travel:
    """What the configuration asks for; refuses what does not fit."""
    travel = Travel(config.comm.allreduce, config.comm.bucket_mb)
    travel.check(strategy)
    if Compression.parse(strategy.compress).remembers and config.train.precision == "fp16":
        raise ConfigError(
            f"compress={strategy.compress} adds what it did not send to the next gradient, and with "
            "train.precision=fp16 that one may be of another scale; use bf16, or compress=fp16 or int8"
        )
    return travel
