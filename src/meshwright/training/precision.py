"""From the settings to the dtypes of a training."""

from __future__ import annotations

import torch

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.models.float8 import Recipe
from meshwright.parallel.precision import Float8, Precision

COMPUTE = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""In which dtype a model computes, by the name of the precision."""


def precision_of(config: RunConfig) -> Precision:
    """The dtypes that train.precision means, with what [precision] changes."""
    compute = COMPUTE[config.train.precision]
    section = config.precision
    wide = torch.float64 if compute == torch.float64 else torch.float32
    stored = COMPUTE[section.stored] if section.stored else wide
    return Precision(
        stored=stored,
        param=COMPUTE[section.param] if section.param else compute,
        reduce=COMPUTE[section.reduce] if section.reduce else stored,
        buffer=COMPUTE[section.buffer] if section.buffer else wide,
        moments=section.moments,
        seed=config.run.seed,
        float8=_float8_of(config) if config.train.precision == "fp8" else None,
    )


def _float8_of(config: RunConfig) -> Float8:
    section = config.precision
    recipe = Recipe(section.fp8_recipe, section.fp8_weight_gradient, section.fp8_smallest)
    return Float8(recipe, tuple(section.fp8_skip))


def check_device(precision: Precision, device: torch.device) -> None:
    """Raise a ConfigError for a GPU that does not have what the precision needs."""
    if precision.float8 is None or device.type != "cuda":
        return
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"train.precision=fp8: {torch.cuda.get_device_name(device)} has no products of e4m3fn; use bf16"
        )


def uses_tf32(config: RunConfig, device: torch.device) -> bool:
    """Whether products of float32 are in TF32: where it is asked for, on a GPU; a ConfigError for one without it."""
    if config.train.precision != "tf32" or device.type != "cuda":
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"train.precision=tf32: {torch.cuda.get_device_name(device)} has no products in TF32; use float32"
        )
    return True
