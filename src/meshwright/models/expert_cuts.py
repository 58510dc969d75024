"""How tensor parallel cuts stacked experts that bring their layout with them: along the inner width, each expert alike.

The modules are those of transformers, and others that keep to their names:

    gate_up_proj   (experts, 2 x inner, width): all gates before all ups, or in turn (`is_concatenated` False)
    up_proj        (experts, inner, width), without gates; gate_proj likewise
    down_proj      (experts, width, inner)
    ..._bias       (experts, outputs): that of down_proj is whole on every rank, and counts once

With `is_transposed` the last two dimensions of the matrices are the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.errors import ConfigError

_INTO = ("gate_up_proj", "gate_proj", "up_proj")
_OUT = "down_proj"


class Cut(NamedTuple):
    """A dimension that is cut, which may be several lengths behind one another, each of them cut."""

    dim: int
    packs: int = 1

    def style(self, dimensions: int) -> str:
        """The word of transformers for it."""
        return ("packed_" if self.packs > 1 else "") + ("rowwise" if self.dim == dimensions - 1 else "colwise")


def cut_of(module: Any, parameter: str) -> Cut | None:
    """How a parameter of such a module is cut; None where every rank holds all of it."""
    matrix, transposed = parameter.removesuffix("_bias"), getattr(module, "is_transposed", False)
    if matrix == _OUT:
        return None if matrix != parameter else Cut(1 if transposed else 2)
    packs = 2 if matrix == "gate_up_proj" and getattr(module, "is_concatenated", True) else 1
    return Cut(2 if transposed and matrix == parameter else 1, packs)


def check(name: str, module: Any, tp: int) -> None:
    """Raise a ConfigError unless so many ranks can cut the experts of a module."""
    named = dict(module.named_parameters())
    for parameter, value in named.items():
        matrix = parameter.removesuffix("_bias")
        if matrix not in (*_INTO, _OUT) or value.ndim != (3 if matrix == parameter else 2):
            raise ConfigError(
                f"{name}.{parameter} of shape {tuple(value.shape)} is none of {', '.join((*_INTO, _OUT))} with experts "
                "as the first of three dimensions, or their biases: tp cannot cut such experts; use tp=1 with zero=3"
            )
    if _OUT not in named:
        raise ConfigError(f"{name} has no {_OUT}: tp cannot cut such experts; use tp=1 with zero=3")
    down = cut_of(module, _OUT)
    assert down is not None
    inner = named[_OUT].shape[down.dim]
    if inner % tp:
        raise ConfigError(f"tp={tp} does not divide the inner width {inner} of the experts in {name}; use a divisor")
    for parameter, value in named.items():
        cut = cut_of(module, parameter)
        expected = inner * (2 if parameter.startswith("gate_up_proj") else 1)
        if cut is not None and value.shape[cut.dim] != expected:
            raise ConfigError(
                f"{name}.{parameter} has shape {tuple(value.shape)}, and dimension {cut.dim} should be {expected} to "
                "fit its down_proj; set `is_transposed` on the module if that is its layout, or use tp=1"
            )
