"""Checkpoints for tests of them: a few tensors, saved and loaded by one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.format import MANIFEST, Manifest, step_name
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Outcome, Saver
from meshwright.models.presets import preset
from meshwright.parallel.exchange import Exchange

Tensors = Mapping[str, Tensor]


def facts(step: int, **others: object) -> Manifest:
    return Manifest.model_validate(
        {"step": step, "position": 0, "strategy": "dp=1", "model": preset("tiny"), "tensors": {}, **others}
    )


def saver_of(folder: Path, **settings: object) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(LocalPlace(folder), Exchange(None), Retention(), **settings)  # type: ignore[arg-type]


def save(folder: Path, step: int, tensors: Tensors, background: bool = False, **others: object) -> Outcome:
    saver = saver_of(folder)
    parts = {name: Held.of(tensor) for name, tensor in tensors.items()}
    saver.save(facts(step, **others), parts, background=background)
    saver.wait()
    (outcome,) = saver.outcomes()
    return outcome


def saved(folder: Path, step: int, tensors: Tensors, **others: object) -> Path:
    assert save(folder, step, tensors, **others).error is None
    return folder / step_name(step)


def loaded(folder: Path, like: Tensors) -> Tensors:
    room = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    load_parts(CheckpointReader(folder), {name: Held.of(tensor) for name, tensor in room.items()})
    return room


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that somebody made to agree with itself."""
    from meshwright.checkpoint.format import _compact, digest_of

    content = json.loads((folder / MANIFEST).read_text())
    content.pop("digest")
    change(content)
    content["digest"] = digest_of(_compact(content).encode())
    (folder / MANIFEST).write_text(json.dumps(content))
