"""What to plan for, by the flags of a Megatron-LM run: `meshwright plan --megatron-args FILE`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config_load import ResolvedConfig
from meshwright.interop.megatron import flags_of
from meshwright.interop.resolve import resolve_foreign
from meshwright.interop.translation import Translation
from meshwright.models.spec import ModelSpec
from meshwright.planning.carried import Carried
from meshwright.training.job import model_spec


@dataclass(frozen=True)
class Asked:
    """The question that a run of other software answers by its flags."""

    spec: ModelSpec
    sequence_length: int
    global_batch: int
    micro_batch: int | None
    precision: str
    strategy: str
    resolved: ResolvedConfig
    translation: Translation
    carried: Carried
    """What the flags say beside the question."""


def asked_by_megatron(file: str, gpus: int, strategy: str | None = None) -> Asked:
    """The same model, batch and strategy on so many chips; or another strategy, in place of the flags'."""
    overrides = [] if strategy is None else [f"parallel.strategy={strategy}"]
    resolved, translation = resolve_foreign("megatron", file, gpus, overrides=overrides)
    config = resolved.config
    return Asked(
        model_spec(config),
        config.data.sequence_length,
        config.train.global_batch,
        config.train.micro_batch,
        config.train.precision,
        config.parallel.strategy,
        resolved,
        translation,
        Carried(config, file, flags_of(file), frozenset(translation.stated)),
    )
