"""Which fields of a Hugging Face config.json are known, harmless or refused; the lists are in two TOML tables.

`hf_families.toml` holds the supported model types with their defaults, `hf_features.toml` what stops the reading.
Nothing here imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from meshwright.errors import UserError, nearest


class HfFamily(NamedTuple):
    """What transformers' configuration class of a model type knows."""

    name: str
    architecture: str
    defaults: dict[str, Any]
    """Fields with the value that counts when config.json leaves them out."""
    optional: tuple[str, ...]
    """Fields that default to null."""
    aliases: dict[str, str]
    """Second names that are accepted for a field."""

    @property
    def fields(self) -> set[str]:
        """Every field that the class gives a meaning to."""
        return {*self.defaults, *self.optional, *self.aliases}


def hf_families() -> dict[str, HfFamily]:
    """The supported model types by name."""
    return {
        name: HfFamily(
            name, facts["architecture"], facts["defaults"], tuple(facts["optional"]), facts.get("aliases", {})
        )
        for name, facts in _table("hf_families.toml").items()
    }


def family_of(config: Mapping[str, Any], where: str) -> HfFamily:
    """The model type of a config.json; one that is not supported, or another head on it, is a UserError."""
    families, named = hf_families(), config.get("model_type")
    if not isinstance(named, str):
        raise UserError(f"{where}: no model_type; supported: {', '.join(families)}")
    if named not in families:
        close, known = nearest(named, families), ", ".join(families)
        raise UserError(f"{where}: model_type '{named}' is not supported{close}; supported: {known}")
    family = families[named]
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise UserError(
            f"{where}: architectures {architectures} is not supported for {named}; only {family.architecture} is"
        )
    return family


def with_defaults(config: Mapping[str, Any], family: HfFamily, where: str) -> dict[str, Any]:
    """The config with the class's defaults filled in and second names replaced; an explicit null stays null."""
    values = {**family.defaults, **config}
    for alias, field in family.aliases.items():
        if alias in config:
            if config.get(field, config[alias]) != config[alias]:
                raise UserError(f"{where}: {alias}={config[alias]} contradicts {field}={config[field]}")
            values[field] = config[alias]
    return values


def refuse_features(config: Mapping[str, Any], family: HfFamily, where: str) -> None:
    """Raise a UserError for the first field that would change the numbers and that the decoder does not compute."""
    for field, rule in _table("hf_features.toml")["refused"].items():
        value = config.get(field)
        fine = value is None or (value == rule["neutral"] if "neutral" in rule else not value)
        if field not in family.fields and not fine:
            shown = "" if isinstance(value, dict | list) else f"={value}"
            raise UserError(f"{where}: {field}{shown} is not supported: {rule['why']}")


def config_notes(config: Mapping[str, Any], where: str) -> list[str]:
    """What a reader should know about a config.json although it changes no logits, as sentences."""
    family = family_of(config, where)
    values, notes = with_defaults(config, family, where), []
    dropped = {field: values[field] for field in ("attention_dropout", "attn_pdrop") if values.get(field)}
    notes += [f"{field}={rate} is left out: attention weights are not dropped" for field, rate in dropped.items()]
    if values.get("embd_pdrop") != values.get("resid_pdrop"):
        embedding, residual = values["embd_pdrop"], values["resid_pdrop"]
        notes.append(f"embd_pdrop={embedding} is left out: the one dropout rate is resid_pdrop={residual}")
    if values.get("router_jitter_noise"):
        notes.append(f"router_jitter_noise={values['router_jitter_noise']} is left out: the router has no noise")
    if config.get("auto_map"):
        notes.append("auto_map names Python code in the folder, which is never run; the weights are read without it")
    features = _table("hf_features.toml")
    known = family.fields | {"auto_map", *features["harmless"], *features["refused"]}
    if unknown := sorted(field for field, value in config.items() if field not in known and value not in (None, False)):
        notes.append(f"fields that are not known and not used: {', '.join(unknown)}")
    return [f"{where}: {note}" for note in notes]


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(files("meshwright.models").joinpath(name).read_text(encoding="utf-8"))
