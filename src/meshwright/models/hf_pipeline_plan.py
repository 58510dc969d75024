"""In which order a Hugging Face model calls its parts: what it says of itself (`_pp_plan`) as a plan of ours.

A model that says nothing is taken to call its parts in the order in which they are registered. Either is checked
against a forward pass before it is followed, so a wrong guess is refused and never trained.
"""

from __future__ import annotations

from typing import Any


def hugging_face_pipeline_plan(model: Any) -> tuple[str, ...] | None:
    """Patterns of the parts, in order; None for what is no Hugging Face model."""
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        return None
    modules = dict(model.named_modules())
    theirs = [name for name in getattr(model, "_pp_plan", None) or {} if name in modules]
    if model.base_model is not model and not any("." in name for name in theirs):
        # Some name their head alone.
        theirs = []
    # They name the head before the body.
    parts = sorted(theirs, key=lambda name: "." not in name) if theirs else _registered(model.base_model, model)
    covered = {name.split(".")[0] for name in parts}
    heads = [name for name, child in model.named_children() if name not in covered and _has_parameters(child)]
    return tuple(f"{name}.*" if _is_list(modules[name]) else name for name in (*parts, *heads))


def _registered(base: Any, model: Any) -> list[str]:
    """The parts of a model's body as they are registered; a body inside of the body is opened."""
    path = next(name for name, module in model.named_modules() if module is base)
    parts = [(name, child) for name, child in base.named_children() if _has_parameters(child)]
    if len(parts) == 1 and not _is_list(parts[0][1]):
        return _registered(parts[0][1], model)
    return [f"{path}.{name}".lstrip(".") for name, _ in parts]


def _is_list(module: Any) -> bool:
    return type(module).__name__ == "ModuleList"


def _has_parameters(module: Any) -> bool:
    return any(True for _ in module.parameters())
