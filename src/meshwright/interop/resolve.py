"""A run's settings where a foreign configuration is one of their origins. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.config_load import ResolvedConfig, resolve_config
from meshwright.errors import ConfigError
from meshwright.interop.translation import STRATEGY, Around, Translation

Reader = Callable[[str, Around], Translation]
"""From a file and what is known beside it."""


def reader_of(dialect: str) -> Reader:
    """What reads files of that dialect."""
    if dialect == "deepspeed":
        from meshwright.interop.deepspeed import read_deepspeed

        return read_deepspeed
    if dialect == "megatron":
        from meshwright.interop.megatron import read_megatron

        return read_megatron
    raise ConfigError(f"there is no reader of '{dialect}'")


def resolve_foreign(
    dialect: str,
    path: str,
    ranks: int | None,
    file: str | None = None,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    unknown: bool = False,
) -> tuple[ResolvedConfig, Translation]:
    """The settings that a foreign file, a preset, a run file and overrides give together, and the translation.

    `ranks` is how many there will be; None is what the strategy takes, unless `unknown` says that nobody knows.
    """
    base = resolve_config(file, overrides, preset=preset).config
    settled = any(override.partition("=")[0].strip() == STRATEGY for override in overrides)
    translation = reader_of(dialect)(path, Around(base, ranks, settled, unknown))
    return resolve_config(file, overrides, preset=preset, foreign=translation), translation
