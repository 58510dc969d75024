"""Plan, run, watch and heal the distributed training of language models.

Importing this package does not import torch: names load the module that holds them on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright._version import __version__

if TYPE_CHECKING:
    from meshwright.checkpoint.load_model import load_model
    from meshwright.config import RunConfig, load_config
    from meshwright.models.hf import save_hf
    from meshwright.models.spec import ModelSpec
    from meshwright.parallel.mesh import make_mesh
    from meshwright.parallel.norm import clip_grad_norm_
    from meshwright.parallel.parallelize import parallelize
    from meshwright.planning.answer import plan
    from meshwright.strategy import Strategy
    from meshwright.trainer import Trainer, train
    from meshwright.training.loss import cross_entropy

__all__ = [
    "ModelSpec",
    "RunConfig",
    "Strategy",
    "Trainer",
    "__version__",
    "clip_grad_norm_",
    "cross_entropy",
    "load_config",
    "load_model",
    "make_mesh",
    "parallelize",
    "plan",
    "save_hf",
    "train",
]

_HOME = {
    "ModelSpec": "meshwright.models.spec",
    "RunConfig": "meshwright.config",
    "Strategy": "meshwright.strategy",
    "Trainer": "meshwright.trainer",
    "clip_grad_norm_": "meshwright.parallel.norm",
    "cross_entropy": "meshwright.training.loss",
    "load_config": "meshwright.config",
    "load_model": "meshwright.checkpoint.load_model",
    "make_mesh": "meshwright.parallel.mesh",
    "parallelize": "meshwright.parallel.parallelize",
    "plan": "meshwright.planning.answer",
    "save_hf": "meshwright.models.hf",
    "train": "meshwright.trainer",
}
_NEED_TORCH = {
    "Trainer", "clip_grad_norm_", "cross_entropy", "load_model", "make_mesh", "parallelize", "save_hf", "train",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    if name in _NEED_TORCH:
        from meshwright.torch_support import require_torch

        require_torch()
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
