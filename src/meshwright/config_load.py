"""From a preset, a TOML file and `section.key=value` overrides to a RunConfig, with the origin of every setting.

Later ones win: defaults, then the preset, then the file, then the command line. What is wrong is reported all at once,
each with its place, what was found, what is allowed and the nearest name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from meshwright.errors import ConfigError, nearest
from meshwright.secrets import public

if TYPE_CHECKING:
    from meshwright.config import RunConfig

Tree = dict[str, Any]


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and, for each setting that is not a default, where it came from."""

    config: RunConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Where `section.key` came from, in words."""
        return self.origins.get(key, "default")


def load_config(
    file: str | Path | None = None, overrides: Sequence[str] = (), *, preset: str | None = None
) -> RunConfig:
    """The configuration that these give together."""
    return resolve_config(file, overrides, preset=preset).config


def resolve_config(
    file: str | Path | None = None, overrides: Sequence[str] = (), *, preset: str | None = None
) -> ResolvedConfig:
    """The configuration that these give together, with the origin of each setting."""
    tree: Tree = {}
    origins: dict[str, str] = {}
    if preset is not None:
        _merge(tree, _preset(preset), origins, lambda key: f"preset {preset}")
    if file is not None:
        text = _read(Path(file))
        lines = _lines(text)
        _merge(tree, _parse(text, str(file)), origins, lambda key: f"{file}{_line(lines, key)}")
    for override in overrides:
        _merge(tree, _override(override), origins, lambda key: "command line")
    return ResolvedConfig(_validate(tree, origins), origins)


def run_presets() -> list[str]:
    """Names of the ready-made run configurations."""
    folder = resources.files("meshwright.run_presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def format_config(config: RunConfig) -> str:
    """The configuration as TOML that `load_config` reads back to an equal one, but for the logins of URLs."""
    return tomli_w.dumps(public(config.model_dump(exclude_none=True)))


def _preset(name: str) -> Tree:
    known = run_presets()
    if name not in known:
        raise ConfigError(f"unknown preset '{name}'{nearest(name, known)}; presets are {', '.join(known)}")
    return _parse(resources.files("meshwright.run_presets").joinpath(f"{name}.toml").read_text("utf-8"), name)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error}") from None


def _parse(text: str, where: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None


def _override(text: str) -> Tree:
    key, found, value = text.partition("=")
    parts = key.strip().split(".")
    if not found or len(parts) < 2 or not all(parts):
        raise ConfigError(f"'{text}' is not an override; write section.key=value, such as train.steps=100")
    tree: Any = _value(parts, value.strip())
    for part in reversed(parts):
        tree = {part: tree}
    return tree


def _value(parts: Sequence[str], text: str) -> Any:
    """A value as TOML reads it; what TOML cannot read, and what goes into a text setting, is text.

    TOML has no null: `none` clears a setting that may be left open.
    """
    annotation = _annotation(parts)
    if text == "none" and NoneType in get_args(annotation):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    takes_text = annotation is str or (get_origin(annotation) in (Union, UnionType) and str in get_args(annotation))
    return text if takes_text and not isinstance(value, str | list) else value


def _annotation(parts: Sequence[str]) -> Any:
    """The type of a setting; None where there is none."""
    from meshwright.config import RunConfig

    model = _model_of(RunConfig, parts[:-1])
    field = model.model_fields.get(parts[-1]) if model else None
    return field.annotation if field else None


def _model_of(root: type[BaseModel], parts: Sequence[str]) -> type[BaseModel] | None:
    """The class of the table at a place such as ("data", "mix", "0"); None where tables are free."""
    model: Any = root
    for part in parts:
        if part.isdecimal():
            continue
        field = model.model_fields.get(part)
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if model is None:
            return None
    return model


def _merge(tree: Tree, addition: Tree, origins: dict[str, str], origin: Any, prefix: str = "") -> None:
    """Lay a tree over another; tables merge, values replace."""
    for name, value in addition.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            below = tree.setdefault(name, {})
            if isinstance(below, dict):
                _merge(below, value, origins, origin, f"{key}.")
                origins.setdefault(key, origin(key))
                continue
        tree[name] = value
        origins[key] = origin(key)


def _lines(text: str) -> dict[str, int]:
    """The line of each key in a TOML text; good for messages, not for meaning."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]+", line):
            section = header[1] + "."
            lines.setdefault(header[1], number)
        elif entry := re.match(r"\s*([\w.\-]+)\s*=", line):
            lines.setdefault(section + entry[1], number)
    return lines


def _line(lines: Mapping[str, int], key: str) -> str:
    return f", line {lines[key]}" if key in lines else ""


def _validate(tree: Tree, origins: Mapping[str, str]) -> RunConfig:
    from meshwright.config import RunConfig

    try:
        return RunConfig.model_validate(tree)
    except ValidationError as errors:
        complaints = [_complaint(RunConfig, tree, origins, dict(error)) for error in errors.errors()]
        raise ConfigError("\n  ".join(complaints)) from None


def _complaint(root: type[BaseModel], tree: Tree, origins: Mapping[str, str], error: Mapping[str, Any]) -> str:
    parts = [str(part) for part in error["loc"]]
    if error["type"] == "value_error" and len(parts) < 2:
        # A rule about several settings of a section: the last of them to be set is where to look.
        named = [key for key in origins if key.startswith(f"{'.'.join(parts)}.") and key in str(error["ctx"]["error"])]
        places = dict.fromkeys(origins[key] for key in named)
        return "".join(f"{place}: " for place in places) + str(error["ctx"]["error"])
    # Union types add the tried alternative to the place; the setting itself is the longest known prefix.
    key = next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in origins), ".".join(parts))
    place = origins.get(key, "")
    place = f"{place}: " if place else ""
    if error["type"] == "extra_forbidden":
        return place + _unknown(root, parts)
    if error["type"] == "missing":
        return f"{place}{'.'.join(parts)} is missing"
    found: Any = tree
    for part in key.split("."):
        found = found.get(part, {}) if isinstance(found, dict) else found
    rule = re.sub(r"^(Input|String|List|Dictionary|Value error,) ", "", error["msg"])
    return f"{place}{key} = {found!r} {rule}"


def _unknown(root: type[BaseModel], parts: Sequence[str]) -> str:
    if len(parts) == 1:
        sections = list(root.model_fields)
        return f"unknown section [{parts[0]}]{nearest(parts[0], sections)}; sections are {', '.join(sections)}"
    model = _model_of(root, parts[:-1])
    known = list(model.model_fields) if model else []
    table, key = ".".join(parts[:-1]), parts[-1]
    # A setting of another section under its right name is a likelier slip than a misspelt one of this section.
    owners = [name for name in root.model_fields if (m := _model_of(root, [name])) and key in m.model_fields]
    hint = f" (did you mean '{owners[0]}.{key}'?)" if owners else nearest(key, known)
    return f"unknown setting '{table}.{key}'{hint}; [{table}] has {', '.join(known)}"
