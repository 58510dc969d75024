"""A run's settings as `meshwright train` and `meshwright launch` take them: one file, a preset, overrides, and the
configuration of another trainer. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from meshwright.config_load import ResolvedConfig, resolve_config, run_presets
from meshwright.errors import ConfigError
from meshwright.interop.resolve import resolve_foreign

Ranks = Callable[[], tuple[int | None, bool]]
"""How many there will be, None for what the strategy takes; and whether that is open until they meet."""


def describe_settings(parser: argparse.ArgumentParser) -> None:
    """Arguments that say what is trained."""
    parser.add_argument("settings", nargs="*", metavar="FILE | section.key=value", help="one TOML file, any overrides")
    parser.add_argument("--preset", help=f"ready-made run: {', '.join(run_presets())}")
    parser.add_argument("--deepspeed", metavar="FILE", help="take settings from a ds_config.json; docs/interop.md")
    parser.add_argument(
        "--megatron-args", metavar="FILE", help="take settings from the flags of a Megatron-LM run; docs/interop.md"
    )


def resolved_settings(
    args: argparse.Namespace, ranks: Ranks, more: list[str] | None = None, quiet: bool = False
) -> ResolvedConfig:
    """All of them together, `more` overrides behind those of the command line; says, unless `quiet`, what became of
    another trainer's keys and names."""
    file, overrides = _file(args), [setting for setting in args.settings if "=" in setting] + (more or [])
    foreign = _foreign(args)
    if foreign is None:
        resolved = resolve_config(file, overrides, preset=args.preset)
    else:
        from meshwright.interop.show import print_translation

        count, unknown = ranks()
        resolved, translation = resolve_foreign(*foreign, count, file, overrides, preset=args.preset, unknown=unknown)
        if not quiet:
            print_translation(translation, resolved)
    for note in () if quiet else resolved.notes:
        print(f"note   {note}")
    return resolved


def machine_range(text: str) -> tuple[int, int]:
    """The fewest and the most machines of --nodes."""
    least, several, most = text.partition(":")
    most = most if several else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"--nodes takes a number of machines or MIN:MAX, not '{text}'")
    return int(least), int(most)


def _file(args: argparse.Namespace) -> str | None:
    """The run file among the settings."""
    files = [setting for setting in args.settings if "=" not in setting]
    if len(files) > 1:
        raise ConfigError(
            f"one configuration file at a time, not {' and '.join(files)}; overrides are section.key=value"
        )
    return files[0] if files else None


def _foreign(args: argparse.Namespace) -> tuple[str, str] | None:
    """The dialect and the file of a foreign configuration."""
    if args.deepspeed is not None and args.megatron_args is not None:
        raise ConfigError("--deepspeed and --megatron-args are two descriptions of one run; give one of them")
    if args.deepspeed is not None:
        return "deepspeed", args.deepspeed
    return None if args.megatron_args is None else ("megatron", args.megatron_args)
