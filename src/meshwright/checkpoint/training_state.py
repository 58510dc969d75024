"""What a checkpoint of a training run holds, as tensors under stable names: the model and AdamW's moments.

Optimizer state is named after parameters, not numbered, so that it can be found again however the model is split.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.load import load_tensors
from meshwright.errors import CheckpointError
from meshwright.models.parts import part_like, whole
from meshwright.models.shapes import shapes_of
from meshwright.parallel.local_optimizer import LocalOptimizer


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, each once (tied weights under their first name)."""
    tensors = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The files of a checkpoint: file name -> tensor name -> tensor on the CPU."""
    weights = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    moments = {
        f"optimizer.{kind}.{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in _state_of(optimizer, parameter).items()
    }
    return {"model.safetensors": _on_cpu(weights), "optimizer.safetensors": _on_cpu(moments)}


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def restore_model(model: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Copy a checkpoint's weights into a model of the same shape."""
    targets = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    for name, value in load_tensors(folder, manifest, targets):
        _copy(targets[name], value, name)


@torch.no_grad()
def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, manifest: Manifest) -> None:
    """Copy a checkpoint's moments into an optimizer of that model."""
    parameters = dict(model.named_parameters())
    known = shapes_of(manifest.model)
    names = [name for name in manifest.tensors if name.startswith("optimizer.")]
    for name in names:
        if name.split(".", 2)[2] not in known:
            raise CheckpointError(f"{folder} has state of {name}, which the model does not have")
    # A pipeline rank has the parameters of its own stages.
    names = [name for name in names if name.split(".", 2)[2] in parameters]
    for name, value in load_tensors(folder, manifest, names):
        _, kind, parameter_name = name.split(".", 2)
        parameter = parameters[parameter_name]
        if isinstance(optimizer, LocalOptimizer):
            if value.ndim and value.shape != parameter.shape:
                raise CheckpointError(f"{name} is {tuple(value.shape)} and its parameter {tuple(parameter.shape)}")
            optimizer.load_state(parameter, kind, value)
        else:
            # A fused optimizer keeps the count of steps where the moments are.
            optimizer.state[parameter][kind] = value.to(parameter.device)


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, LocalOptimizer):
        return optimizer.state_of(parameter)
    return dict(optimizer.state.get(parameter, {}))


def _copy(target: Tensor, value: Tensor, name: str) -> None:
    if target.shape != value.shape or target.dtype != value.dtype:
        raise CheckpointError(
            f"{name} is {value.dtype} {tuple(value.shape)} in the checkpoint "
            f"and {target.dtype} {tuple(target.shape)} in the model"
        )
    target.copy_(part_like(value, target))
