"""Precision: in which dtype parameters are stored, read, summed.

Stored parameters and their gradients are float32, or bfloat16 (float64 in proofs). With bf16 and fp16 the model's code
reads the parameters in that dtype and computes in it, whatever the strategy; where it says so itself (softmax of a
router, loss) it computes in float32. Gradients travel in `reduce`. The decoder's own layers (those with `reads_itself`)
do it where they use a weight, and looked-up embeddings are rounded instead of all of them. With `float8`, linears
multiply in 8 bits what they read; everything else is as without it. Stacked experts are no linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.float8 import Recipe, float8_linear
from meshwright.models.head import Head
from meshwright.models.linear import Linear, Product, multiply_by
from meshwright.models.reads import Transform, around_forward, is_read, kind_of, read_through, seen
from meshwright.models.shapes import SENSITIVE_LINEARS
from meshwright.models.stacked_experts import StackedExperts
from meshwright.optim.adamw import Moments
from meshwright.torch_private import parameters_of


@dataclass(frozen=True)
class Float8:
    """Which linears multiply in 8 bits, and how."""

    recipe: Recipe = field(default_factory=Recipe)
    skip: tuple[str, ...] = SENSITIVE_LINEARS
    """Patterns of names of linears that do not."""

    def skips(self, name: str) -> bool:
        """Whether one of the patterns fits."""
        return any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training."""

    stored: torch.dtype = torch.float32
    """Of parameters and gradients."""
    param: torch.dtype = torch.float32
    """Of parameters where the model computes with them, and so of activations."""
    reduce: torch.dtype = torch.float32
    """Of gradients where they are summed over ranks."""
    buffer: torch.dtype | None = torch.float32
    """Of the model's own state that is not trained; None leaves it as it is."""
    float8: Float8 | None = None
    """Linears that multiply in 8 bits; None for none."""
    moments: Moments = "float32"
    """How AdamW keeps its moments; float32 means as wide as what is stored, where that is wider."""
    seed: int = 0
    """Of the random bits by which narrow weights and moments are rounded."""

    @property
    def narrow(self) -> bool:
        """Whether weights or moments are kept in less than float32, which not every optimizer can."""
        return self.stored == torch.bfloat16 or self.moments != "float32"

    @property
    def mixed(self) -> bool:
        """Whether the model computes in another dtype than it stores."""
        return self.param != self.stored


def apply(model: nn.Module, precision: Precision) -> None:
    """Let the model's code read its parameters in the dtype to compute in, and give its buffers theirs."""
    for module in model.modules():
        if precision.mixed:
            _compute_in(module, precision.param)
        for name, buffer in module._buffers.items():
            if precision.buffer and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(precision.buffer)


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    if getattr(module, "reads_itself", False):
        return
    if isinstance(module, nn.Embedding) and not is_read(module):
        around_forward(module, _rounding(dtype))
        return
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_floating_point():
            read_through(module, name, _cast_to(dtype))


@cache
def _rounding(dtype: torch.dtype) -> Callable[..., Tensor]:
    def look_up(forward: Callable[..., Tensor], *inputs: Tensor, **options: Tensor) -> Tensor:
        return forward(*inputs, **options).to(dtype)

    return look_up


@cache
def _cast_to(dtype: torch.dtype) -> Transform:
    def cast(parameter: Tensor) -> Tensor:
        return parameter.to(dtype)

    return cast


def check(model: nn.Module, precision: Precision) -> None:
    """Raise a ConfigError for a pattern that fits nothing in the whole model; those that are there by default may."""
    names = [name for name, _ in _linears(model)]
    for pattern in precision.float8.skip if precision.float8 is not None else ():
        if pattern not in SENSITIVE_LINEARS and not any(fnmatchcase(name, pattern) for name in names):
            known = f"linears are named like {names[-1]}" if names else "the model has no linears"
            raise ConfigError(f"precision.fp8_skip has '{pattern}', which fits no linear: {known}; mend or remove it")


def multiply_in_float8(model: nn.Module, float8: Float8) -> None:
    """Let the model's linears multiply in 8 bits; before anything is put around their forward passes."""
    for name, linear in _linears(model):
        if not float8.skips(name) and not isinstance(linear, Head):
            multiply_by(linear, _product(float8.recipe), repr(float8.recipe))


@cache
def _product(recipe: Recipe) -> Product:
    # One for all linears: a compiler would take another one for other code.
    return partial(float8_linear, recipe=recipe)


def not_in_float8(model: nn.Module, float8: Float8) -> dict[str, str]:
    """The modules with matrices that do not, and why; after matrices are split, before anything else is done to them.

    Raises a ConfigError where none does.
    """
    reasons = {}
    linears = dict(_linears(model))
    for name, linear in linears.items():
        with torch.no_grad():
            weight = seen(linear, "weight")
        assert weight is not None
        shape = weight.shape
        obstacle = "precision.fp8_skip" if float8.skips(name) else float8.recipe.obstacle(shape)
        if isinstance(linear, Head):
            obstacle = obstacle or "its products come with the loss"
        if obstacle is not None:
            reasons[name] = f"{shape[0]} x {shape[1]}: {obstacle}"
    if linears and len(reasons) == len(linears):
        name, reason = next(iter(reasons.items()))
        raise ConfigError(
            f"train.precision=fp8, and no linear of this model multiplies in 8 bits ({name} is {reason}, ...); "
            "use bf16, or change precision.fp8_skip and precision.fp8_smallest"
        )
    return reasons | {
        name: "stacked experts" for name, module in model.named_modules() if isinstance(module, StackedExperts)
    }


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        # Others that are made of it may multiply elsewhere, as those of nn.MultiheadAttention do.
        if kind_of(module) is nn.Linear or isinstance(module, Linear):
            yield name, module
