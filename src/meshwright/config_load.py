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
from meshwright.known_names import FOREIGN, in_our_words, our_setting, our_words
from meshwright.secrets import public

if TYPE_CHECKING:
    from meshwright.config import RunConfig
    from meshwright.interop.translation import Translation

Tree = dict[str, Any]
AUTO = "auto"
STRATEGY = "parallel.strategy"


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and, for each setting that is not a default, where it came from."""

    config: RunConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What was written under another trainer's name, and ours."""

    def origin(self, key: str) -> str:
        """Where `section.key` came from, in words."""
        return self.origins.get(key, "default")


def load_config(
    file: str | Path | None = None, overrides: Sequence[str] = (), *, preset: str | None = None
) -> RunConfig:
    """The configuration that these give together."""
    return resolve_config(file, overrides, preset=preset).config


def resolve_config(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    foreign: Translation | None = None,
) -> ResolvedConfig:
    """The configuration that these give together, with the origin of each setting.

    What a `foreign` configuration states comes after the file, which must not say otherwise; what it assumes before.
    """
    tree: Tree = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    if preset is not None:
        _merge(tree, _preset(preset), origins, lambda key: f"preset {preset}")
    if foreign is not None:
        _merge(tree, nested(foreign.assumed), origins, foreign.origin)
    if file is not None:
        text = _read(Path(file))
        lines = _lines(text)
        written = _Place(str(file), notes)
        written.put(_parse(text, str(file)))
        _merge(tree, written.ours(tree), origins, lambda key: f"{file}{_line(lines, key)}")
    given = _Place("command line", notes)
    for override in overrides:
        given.put(_override(override))
    if foreign is not None:
        if file is not None:
            _agree(tree, origins, foreign, f"{file}", set(_flat(given.ours(tree))))
        _merge(tree, nested(foreign.stated), origins, foreign.origin)
    _merge(tree, given.ours(tree), origins, lambda key: "command line")
    return ResolvedConfig(_validate(tree, origins), origins, tuple(dict.fromkeys(notes)))


class _Place:
    """The settings of one place, a file or the command line, on their way from names of other trainers to ours.

    Of one name the later value wins; two names of one setting must not say different things.
    """

    def __init__(self, place: str, notes: list[str]) -> None:
        self._place, self._notes = place, notes
        self._tree: Tree = {}
        self._degrees: dict[str, str] = {}
        self._said: dict[str, dict[str, tuple[Any, Any]]] = {}
        """For each setting, and each word of the strategy, its names, and the value there and here."""
        self._ruled_out: list[str] = []
        """Precisions."""

    def put(self, tree: Tree) -> None:
        """Take settings in."""
        from meshwright.config import RunConfig

        for name, value in tree.items():
            section = RunConfig.model_fields.get(name)
            if section is None and not isinstance(value, dict):
                self._take(name, value, f"{name}")
                continue
            known = _model_of(RunConfig, [name]) if section is not None else None
            if known is None or not isinstance(value, dict):
                _merge(self._tree, {name: value}, {}, str)
                continue
            for key, below in value.items():
                if key in known.model_fields or name not in ("train", "parallel"):
                    _merge(self._tree, {name: {key: below}}, {}, str)
                    self._say(f"{name}.{key}", f"{name}.{key}", below, below)
                else:
                    self._take(key, below, f"{name}.{key}")

    def _take(self, name: str, value: Any, written: str) -> None:
        """Put one setting under our name; one that nobody knows stays where it is, to be refused."""
        words = our_words(name, str(value))
        if words is not None:
            self._degrees[name] = str(value).lower()
            for key, word in words.items():
                self._say(key, name, value, word)
            return
        try:
            found = our_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"{self._place}: {error}") from None
        if found is None:
            _merge(self._tree, nested({written: value}), {}, str)
            return
        self._notes.append(found.note)
        if found.setting:
            _merge(self._tree, nested({found.setting: found.value}), {}, str)
            self._say(found.setting, name, value, found.value)
        else:
            self._ruled_out.append(name)

    def _say(self, setting: str, name: str, given: Any, value: Any) -> None:
        self._said.setdefault(setting, {})[name] = given, value

    def ours(self, before: Tree) -> Tree:
        """All of it under our names, over what other places say; degrees are words of the strategy."""
        section = self._tree.get("parallel", {})
        text = section.get("strategy") if isinstance(section, dict) else None
        if isinstance(text, str):
            text, notes = in_our_words(text)
            self._notes += notes
            for word in text.split():
                key, equals, value = word.partition("=")
                if equals and key.isidentifier():
                    self._say(key, f"{STRATEGY}: {key}", value, value)
            section["strategy"] = text
        self._refuse_contradictions()
        self._refuse_what_is_ruled_out(before)
        if not self._degrees or not isinstance(section, dict):
            return self._tree
        below = before.get("parallel", {})
        base = text or (below.get("strategy", AUTO) if isinstance(below, dict) else AUTO)
        changed = {key for name, value in self._degrees.items() for key in our_words(name, value) or {}}
        kept = [word for word in str(base).split() if re.split(r"\W", word)[0] not in changed]
        degrees = [f"{name}={value}" for name, value in self._degrees.items()]
        # Alone it would leave to the planner what the degrees say; with constraints they are some more.
        asked, notes = in_our_words(" ".join([*(kept if kept != [AUTO] else []), *degrees]))
        self._notes += notes
        return {**self._tree, "parallel": {**section, "strategy": asked or "dp=auto"}}

    def _refuse_what_is_ruled_out(self, before: Tree) -> None:
        """`bf16=false` over a precision of bf16 does not say which other one is meant."""
        sections = [self._tree.get("train", {}), before.get("train", {})]
        precision = next((one["precision"] for one in sections if isinstance(one, dict) and "precision" in one), None)
        if precision in self._ruled_out:
            raise ConfigError(
                f"{self._place}: {precision}=false, and train.precision is {precision}; say what it is to be, such as "
                "train.precision=float32"
            )

    def _refuse_contradictions(self) -> None:
        complaints = []
        for setting, said in self._said.items():
            first, *others = [value for _, value in said.values()]
            # One name alone contradicts nothing: NaN, which is not equal to itself, is refused for what it is.
            if all(value == first for value in others):
                continue
            names = " and ".join(f"{name}={str(given).lower()}" for name, (given, _) in said.items())
            complaints.append(f"{self._place}: {names} are one setting, {setting}, and differ; leave one of them out")
        if complaints:
            raise ConfigError("\n  ".join(complaints))


def nested(settings: Mapping[str, Any]) -> Tree:
    """Settings by their full names as a tree."""
    tree: Tree = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
        below[name] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as settings by their full names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _agree(tree: Tree, origins: Mapping[str, str], foreign: Translation, file: str, settled: set[str]) -> None:
    """Raise where the run file and a foreign one say different things, and the command line does not settle it."""
    written = {key: value for key, value in _flat(tree).items() if origins.get(key, "").startswith(file)}
    both = [key for key in foreign.stated if key in written and key not in settled and key not in foreign.merged]
    complaints = [
        f"{origins[key]} says {key}={written[key]!r} and {foreign.origin(key)} says {foreign.stated[key]!r}; "
        f"leave one of them out, or settle it with {key}=... on the command line"
        for key in both
        if written[key] != foreign.stated[key]
    ]
    if complaints:
        raise ConfigError("\n  ".join(complaints))


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
    if found and len(parts) == 1 and parts[0] in FOREIGN:
        return {parts[0]: _value(parts, value.strip())}
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
        # A setting that may be one of several kinds has an error for each of them.
        rules: dict[str, list[str]] = {}
        for error in errors.errors():
            setting, rule = _complaint(RunConfig, tree, origins, dict(error))
            rules.setdefault(setting, []).append(rule)
        complaints = [f"{setting} {', or '.join(dict.fromkeys(found))}".rstrip() for setting, found in rules.items()]
        raise ConfigError("\n  ".join(complaints)) from None


def _complaint(
    root: type[BaseModel], tree: Tree, origins: Mapping[str, str], error: Mapping[str, Any]
) -> tuple[str, str]:
    """The place, the setting and its value, and what it should be; or all of it in one."""
    parts = [str(part) for part in error["loc"]]
    if error["type"] == "value_error" and len(parts) < 2:
        # A rule about several settings of a section: the last of them to be set is where to look.
        named = [key for key in origins if key.startswith(f"{'.'.join(parts)}.") and key in str(error["ctx"]["error"])]
        places = dict.fromkeys(origins[key] for key in named)
        return "".join(f"{place}: " for place in places) + str(error["ctx"]["error"]), ""
    # Union types add the tried alternative to the place; the setting itself is the longest known prefix.
    key = next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in origins), ".".join(parts))
    place = origins.get(key, "")
    place = f"{place}: " if place else ""
    if error["type"] == "extra_forbidden":
        return place + _unknown(root, parts), ""
    if error["type"] == "missing":
        return f"{place}{'.'.join(parts)} is missing", ""
    found: Any = tree
    for part in key.split("."):
        found = found.get(part, {}) if isinstance(found, dict) else found
    rule = re.sub(r"^(Input|String|List|Dictionary|Value error,) ", "", error["msg"])
    return f"{place}{key} = {found!r}", rule


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
