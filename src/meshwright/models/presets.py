"""Published models and a few small ones of our own, by name; the facts are in `presets.toml`. No torch here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from meshwright.errors import UserError, nearest
from meshwright.models.spec import ModelSpec


@dataclass(frozen=True)
class Preset:
    """A model's shape with its name and where the facts come from."""

    name: str
    spec: ModelSpec
    source: str
    published_parameters: int | None = None
    """The exact number of weights that the makers' files hold."""
    published_billions: tuple[float, ...] = ()
    """What the makers say in words: total, or total and active per token."""


def presets() -> dict[str, Preset]:
    """All presets by name, in the order of the table."""
    table = tomllib.loads(files("meshwright.models").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: _preset(name, dict(facts)) for name, facts in table.items()}


def preset(name: str) -> ModelSpec:
    """The shape of a preset; an unknown name is a UserError that lists the known ones."""
    return find_preset(name).spec


def find_preset(name: str) -> Preset:
    """A preset with its source; an unknown name is a UserError that lists the known ones."""
    known = presets()
    # People type what the model card says: Llama3.1-8B, Qwen2.5_7b.
    plain = name.lower().replace("_", "-")
    if plain not in known:
        raise UserError(f"unknown model preset '{name}'{nearest(plain, known)}; known: {', '.join(known)}")
    return known[plain]


def _preset(name: str, facts: dict[str, object]) -> Preset:
    source = str(facts.pop("source"))
    exact, billions = facts.pop("published_parameters", None), facts.pop("published_billions", ())
    assert exact is None or isinstance(exact, int)
    assert isinstance(billions, list | tuple)
    return Preset(name, ModelSpec.model_validate(facts), source, exact, tuple(map(float, billions)))
