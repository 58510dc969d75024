"""What a checkpoint of a training run holds, as tensors under stable names: the model and the optimizer's state.

Optimizer state is named after parameters, not numbered, so that it can be found again however the model is split.
Moments of 8 bits are held in float32, since scales belong to neighbours on a rank: any strategy and any other kind of
moments can go on from them. That takes four times as much on disk, and in memory a piece of it when saving and a
parameter's when loading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.pieces import Held, dtype_name
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.unsent import BASIS, UNSENT, check_unsent
from meshwright.errors import CheckpointError
from meshwright.models.shapes import shapes_of
from meshwright.models.spec import ModelSpec
from meshwright.optim.adamw import CODES, FusedAdamW, scales_of
from meshwright.optim.codes import Coded
from meshwright.parallel.local_optimizer import LocalOptimizer


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, each once (tied weights under their first name)."""
    tensors = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Held]:
    """This rank's parts of all that a checkpoint holds."""
    tensors = state_tensors(model, optimizer)
    parts = {name: Held.of(tensor) for name, tensor in tensors.items()}
    for name in tensors:
        kind, parameter = _kind_of(name)
        scales = parts.pop(f"optimizer.{scales_of(kind)}.{parameter}", None) if kind in CODES else None
        if scales is not None:
            parts[name] = replace(parts[name], coded=Coded(CODES[kind], parts[name].local, scales.local))
    return parts


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """All that is to be remembered, as it is held, by name; split tensors know their place in the whole."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model_tensors(model).items()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        assert optimizer is not None
        tensors |= {f"optimizer.{kind}.{name}": value for kind, value in _state_of(optimizer, parameter).items()}
    return tensors


def restore(reader: CheckpointReader, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill this rank's parts of a model, and of an optimizer of it, from a checkpoint of any strategy."""
    manifest = reader.manifest
    if manifest.model is not None:
        check_names(manifest)
    parts = {f"model.{name}": Held.of(tensor) for name, tensor in model_tensors(model).items()}
    if optimizer is not None:
        parameters = dict(model.named_parameters())
        for name, entry in manifest.tensors.items():
            kind, parameter_name = _kind_of(name)
            # A pipeline rank has the parameters of its own stages.
            parameter = parameters.get(parameter_name) if kind else None
            if parameter is None:
                continue
            wanted = _wanted(optimizer, parameter, kind)
            # Codes of 8 bits are never read from a file.
            moment = kind != "step" and entry.shape == tuple(parameter.shape)
            other = moment and (entry.dtype != wanted or wanted == "uint8")
            if other and not (entry.dtype in _NARROW and wanted in (*_NARROW, "uint8")):
                raise CheckpointError(
                    f"{name} is {entry.dtype} in the checkpoint and its parameter {dtype_name(parameter.dtype)}; "
                    "give the precision that it was saved with"
                )
            reader.see(name)
            part = Held.of(_room(optimizer, parameter, kind, entry.shape, getattr(torch, entry.dtype)))
            if other:
                # One by one, so that there is never more than one of them in both forms.
                load_parts(reader, {name: part})
                _settle(optimizer, parameter, kind)
            else:
                parts[name] = part
    load_parts(reader, parts)


_NARROW = ("float32", "bfloat16")
"""Dtypes of moments in files, each of which may go on as another."""


def _wanted(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str) -> str:
    """In which dtype the optimizer keeps a moment."""
    inner = optimizer.inner if isinstance(optimizer, LocalOptimizer) else optimizer
    return dtype_name(inner.kept if isinstance(inner, FusedAdamW) and kind in CODES else parameter.dtype)


def _settle(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str) -> None:
    """Give a moment that was loaded the form that the optimizer keeps it in."""
    inner, part = optimizer, parameter
    if isinstance(optimizer, LocalOptimizer):
        inner, (part, _) = optimizer.inner, optimizer.part_of(parameter)
    if isinstance(inner, FusedAdamW):
        inner.settle(part, kind)
    else:
        inner.state[part][kind] = inner.state[part][kind].to(part.dtype)


def _kind_of(name: str) -> tuple[str, str]:
    """The kind of optimizer state and the parameter that a tensor belongs to; no kind where it is no such state."""
    first, _, rest = name.partition(".")
    kind, _, parameter = rest.partition(".")
    return (kind, parameter) if first == "optimizer" else ("", rest)


def spec_of(manifest: Manifest) -> ModelSpec:
    """The shape of a checkpoint's decoder; raises where it is of another module."""
    if manifest.model is None:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is of a module of one's own, not of a decoder; load it with "
            "parallel.load(folder) where that module is"
        )
    return manifest.model


def check_names(manifest: Manifest) -> None:
    """Raise unless a checkpoint holds all tensors of its model and, with an optimizer, the same state for each."""
    spec = spec_of(manifest)
    if spec.num_hidden_layers > len(manifest.tensors):
        # Seen before anything is counted out for each layer.
        layers = spec.num_hidden_layers
        raise CheckpointError(f"the checkpoint's model has {layers:,} layers and {len(manifest.tensors)} tensors")
    shapes = shapes_of(spec)
    _compare("model", shapes, (name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")))
    kinds: dict[str, set[str]] = {}
    for name in manifest.tensors:
        kind, parameter = _kind_of(name)
        if kind:
            kinds.setdefault(parameter, set()).add(kind)
        elif not name.startswith(("model.", f"{UNSENT}.", f"{BASIS}.")):
            raise CheckpointError(f"the checkpoint has {name}, which is neither a model's nor an optimizer's")
    check_unsent(manifest, shapes)
    if not kinds:
        return
    _compare("optimizer", shapes, kinds)
    # Some optimizers keep other state for matrices than for vectors.
    for matrices in (False, True):
        alike = [name for name, shape in shapes.items() if (len(shape) > 1) == matrices]
        for name in alike:
            if kinds[name] != kinds[alike[0]]:
                lacking = ", ".join(sorted(kinds[name] ^ kinds[alike[0]]))
                raise CheckpointError(f"the checkpoint's optimizer state is incomplete: {lacking} of {name}")


def check_optimizer(manifest: Manifest, of_matrices: frozenset[str], of_vectors: frozenset[str]) -> None:
    """Raise unless a checkpoint has these kinds of state for every matrix and vector of its model, and no others."""
    kept = of_matrices | of_vectors
    for name in manifest.tensors:
        kind, _ = _kind_of(name)
        if kind and kind not in kept:
            raise CheckpointError(
                f"the checkpoint has {name}, which this run's train.optimizer does not keep; give the one that it was "
                "saved with"
            )
    for name, shape in shapes_of(spec_of(manifest)).items():
        for kind in sorted(of_matrices if len(shape) > 1 else of_vectors):
            if f"optimizer.{kind}.{name}" not in manifest.tensors:
                raise CheckpointError(
                    f"the checkpoint of step {manifest.step} lacks {kind} of {name}, without which this run's "
                    "train.optimizer cannot go on; give the one that it was saved with, or another checkpoint"
                )


def _compare(what: str, wanted: Iterable[str], found: Iterable[str]) -> None:
    wanted, found = set(wanted), set(found)
    buffers = {name for name in found - wanted if name.endswith("expert_bias")}
    for complaint, names in (("lacks", wanted - found), ("has beyond its spec", found - wanted - buffers)):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"the checkpoint's {what} {complaint}: {listed}")


def check_size(manifest: Manifest, spec: ModelSpec) -> None:
    """Raise unless a checkpoint has the model's tensors with their shapes, so that nothing larger is ever allocated."""
    check_names(manifest)
    for name, shape in shapes_of(spec).items():
        if manifest.tensors[f"model.{name}"].shape != tuple(shape):
            raise CheckpointError(f"the checkpoint's {name} has another shape than its own model spec says")


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, LocalOptimizer):
        return optimizer.state_of(parameter)
    return dict(optimizer.state.get(parameter, {}))


def _room(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Memory for a kind of a parameter's state, in the optimizer's own hands."""
    if isinstance(optimizer, LocalOptimizer):
        if shape and shape != tuple(parameter.shape):
            raise CheckpointError(f"{kind} is {list(shape)} and its parameter {list(parameter.shape)}")
        return optimizer.room_for(parameter, kind, bool(shape), dtype)
    # Factored moments are smaller than their parameter; nothing that is kept for it is larger.
    if prod(shape) > max(1, parameter.numel()):
        raise CheckpointError(f"{kind} is {list(shape)} and its parameter {list(parameter.shape)}")
    # A fused optimizer keeps the count of steps where the moments are.
    room = torch.empty(shape, dtype=dtype, device=parameter.device)
    if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
        room = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    optimizer.state[parameter][kind] = room
    return room
