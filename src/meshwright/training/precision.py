"""From the settings to the dtypes of a training."""

from __future__ import annotations

import torch

from meshwright.config import RunConfig
from meshwright.parallel.precision import Precision

_COMPUTE = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(config: RunConfig) -> Precision:
    """The dtypes that train.precision means, with what [precision] changes."""
    compute = _COMPUTE[config.train.precision]
    stored = torch.float64 if compute == torch.float64 else torch.float32
    section = config.precision
    return Precision(
        stored=stored,
        param=_COMPUTE[section.param] if section.param else compute,
        reduce=_COMPUTE[section.reduce] if section.reduce else stored,
        buffer=_COMPUTE[section.buffer] if section.buffer else stored,
    )
