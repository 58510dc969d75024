"""What a run's other settings leave to choose of its strategy, for whoever chooses one by itself. No torch.

How gradients travel ([comm]), the order of axes (parallel.placement), the optimizer and a given micro-batch each refuse
some strategies. The planner hears of it as constraints, and what it has chosen is checked as a job is.
"""

from __future__ import annotations

from meshwright.axis_order import AUTO, AXES, IN_ORDER, named_axes, parse_order
from meshwright.comm.travel import BACKEND
from meshwright.config import RunConfig
from meshwright.strategy import Strategy
from meshwright.training.travel import travel_of


def limits_of(config: RunConfig) -> dict[str, list[str]]:
    """Constraints by the setting that they follow from."""
    found: dict[str, list[str]] = {}
    if config.train.micro_batch is not None:
        found["train.micro_batch"] = [f"micro_batch={config.train.micro_batch}"]
    if config.train.optimizer == "adafactor":
        found["train.optimizer=adafactor"] = ["zero=0", "tp=1", "offload=none"]
    return found | travel_limits(config)


def travel_limits(config: RunConfig) -> dict[str, list[str]]:
    """Those of how gradients travel, and between whom."""
    found: dict[str, list[str]] = {}
    comm, placement = config.comm, config.parallel.placement
    if comm.allreduce != BACKEND:
        found[f"comm.allreduce={comm.allreduce}"] = ["zero<=1", "tp=1", "pp=1", "ep=1"]
    if comm.bucket_mb is not None:
        found[f"comm.bucket_mb={comm.bucket_mb}"] = ["zero<=2"]
    if placement not in (AUTO, IN_ORDER):
        found[f"parallel.placement={placement}"] = _order_limits(placement)
    return {setting: words for setting, words in found.items() if words}


def _order_limits(placement: str) -> list[str]:
    """Axes that an order does not name have one rank; of those that it names the wrong way round, only one has more."""
    named = named_axes(placement)
    alone = [axis for axis in AXES if axis not in named]
    before = {axis: named[: named.index(axis)] for axis in named}
    if "shard" in before.get("replicate", ()):
        alone.append("shard")
    if "cp" in (*before.get("replicate", ()), *before.get("shard", ())):
        alone.append("cp")
    return [f"{axis}=1" for axis in dict.fromkeys(alone)]


def check_leeway(config: RunConfig, strategy: Strategy) -> None:
    """Raise a ConfigError where those settings refuse a strategy."""
    travel_of(config, strategy)
    parse_order(config.parallel.placement, strategy)


def whence(limits: dict[str, list[str]]) -> str:
    """Where constraints that nobody typed come from, in words."""
    return "; ".join(f"{setting} allows {', '.join(words)} alone" for setting, words in limits.items())
