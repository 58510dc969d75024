"""How a run's gradients travel: the [comm] section, checked against the strategy and the precision. No torch."""

from __future__ import annotations

from meshwright.comm.compression import NONE, Compression
from meshwright.comm.travel import Travel
from meshwright.config import AUTO_STEPS, RunConfig
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy
from meshwright.training.run_folder import RunFolder


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


def length_of(config: RunConfig) -> int:
    """Steps of the run as far as they are known: a schedule that ends later than this part of the run says more."""
    return max(config.train.steps, config.train.schedule_steps or 0)


def check_asked(config: RunConfig) -> None:
    """Refuse settings of compression where a new run asks for none.

    One that goes on may have left it: the setting belongs to the steps that were trained with it. So may one that lost
    ranks, which is why what was asked for counts, and not what runs.
    """
    after, strategy = config.comm.compress_after, config.parallel.strategy
    if after in (0, AUTO_STEPS) or (RunFolder(config.run.dir).holds_run and not config.run.fresh):
        return
    if not any(word.startswith("compress=") and word != f"compress={NONE}" for word in strategy.split()):
        raise ConfigError(
            f"comm.compress_after={after} are steps before gradients are compressed, and '{strategy}' compresses "
            "none: name a parallel.strategy that does, such as 'dp=N compress=int8', or leave comm.compress_after out"
        )
